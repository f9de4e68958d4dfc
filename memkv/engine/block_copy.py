"""Blocks from one store of blocks to another, neighbours at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor


def copy_blocks(source: Tensor, source_ids: Sequence[int], target: Tensor, target_ids: Sequence[int]) -> None:
    """target[target_ids] = source[source_ids], by one copy for each run of blocks that follow each other.

    Between pinned memory and a GPU nobody waits: whoever owns the source keeps it until the GPU is done.

    Args:
        source, target: [num_blocks, bytes_per_block] uint8.
    """
    for first, place, count in _runs(source_ids, target_ids):
        target[place : place + count].copy_(source[first : first + count], non_blocking=True)


def _runs(source_ids: Sequence[int], target_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, number of blocks)."""
    start = 0
    for index in range(1, len(source_ids) + 1):
        if index < len(source_ids) and (
            source_ids[index] - source_ids[start] == target_ids[index] - target_ids[start] == index - start
        ):
            continue
        yield source_ids[start], target_ids[start], index - start
        start = index
