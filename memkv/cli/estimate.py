"""What `memkv ingest --dry-run` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memkv.cli.output import Output, bytes_text, counted

if TYPE_CHECKING:
    from memkv.wire import Estimate

_SUMMED = (
    "documents",
    "chunks",
    "tokens",
    "new_chunks",
    "new_tokens",
    "kv_bytes",
    "index_bytes",
    "prefill_seconds",
)


def tell_estimate(estimates: Sequence[Estimate], out: Output) -> bool:
    """Says what all of these cost together; whether they fit."""
    total = {name: sum(getattr(one, name) for one in estimates) for name in _SUMMED}
    uses = [one.keep_after_uses for one in estimates if one.new_chunks]
    keep = None if not uses or None in uses else max(count for count in uses if count is not None)
    room = min((one.room_bytes for one in estimates), default=0)
    fits = bool(total["kv_bytes"] <= room)
    value = {**total, "keep_after_uses": keep, "room_bytes": room, "fits": fits}
    new = f"{counted(int(total['new_chunks']), 'chunk')}, {counted(int(total['new_tokens']), 'token')}"
    out.fields(
        value,
        [
            ("documents", total["documents"]),
            ("chunks", f"{total['chunks']} ({counted(int(total['tokens']), 'token')})"),
            ("without KV yet", new),
            ("kv", bytes_text(total["kv_bytes"])),
            ("index", bytes_text(total["index_bytes"])),
            ("prefill", f"{total['prefill_seconds']:.1f} s"),
            ("worth keeping", _worth(keep, bool(total["new_chunks"]))),
            ("room", f"{bytes_text(room)}: it {'fits' if fits else 'does not fit'}"),
        ],
    )
    return fits


def _worth(uses: int | None, is_new: bool) -> str:
    if not is_new:
        return "it is kept already"
    return "never: the disk is slower than the model" if uses is None else f"from {counted(uses, 'use')} on"
