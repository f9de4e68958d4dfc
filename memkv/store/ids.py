"""Server-made ids: a prefix that names the kind, and a UUIDv7 in hex."""

from __future__ import annotations

import re
import secrets
import time

ID_PATTERN = re.compile(r"^(?:col|doc|chk|job)_[0-9a-f]{32}\Z")


def new_id(prefix: str) -> str:
    """`prefix_` and a UUIDv7 (RFC 9562, 5.7). Sorts by creation as far as the clock is right: only a page's
    order hangs on it.
    """
    milliseconds = time.time_ns() // 1_000_000 & 0xFFFF_FFFF_FFFF
    value = milliseconds << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{prefix}_{value:032x}"
