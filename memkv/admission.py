"""When a chunk's KV is made, and whether it is kept on disk.

eager          at ingest
on_first_use   when a question maps it
after_N_uses   when it is computed for its Nth question or a later one; before, in memory alone
"""

from __future__ import annotations

import re

PATTERN = r"^(eager|on_first_use|after_([2-9]|[1-9][0-9]{1,2})_uses)$(?!\n)"
CHOICES = "eager, on_first_use, or after_N_uses with N from 2 to 999"


def is_possible(prefill: str) -> bool:
    return re.match(PATTERN, prefill) is not None


def uses_to_keep(prefill: str) -> int:
    """How many questions must have mapped a chunk before its KV is worth its bytes."""
    match = re.match(PATTERN, prefill)
    return int(match[2]) if match and match[2] else 0
