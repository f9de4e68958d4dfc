"""Which blocks are free, and how many hold each of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memkv.errors import PoolExhausted


class BlockPool:
    """Free list and reference counts of `num_blocks` blocks.

    A block is free (count 0) or held (count >= 1). `allocate` gives blocks with count 1, `share` adds a
    holder, `release` takes one away; at 0 the block is free again. Neither is given a block twice in one
    call. Not thread-safe: its engine owns it.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "bug: a pool without blocks"
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest id is given first

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block: int) -> int:
        return int(self._counts[block])

    def allocate(self, num_blocks: int) -> list[int]:
        """All of `num_blocks` or none. Raises `PoolExhausted`."""
        assert num_blocks >= 0, "bug: negative number of blocks"
        if num_blocks > len(self._free):
            raise PoolExhausted(f"{num_blocks} blocks are needed and {len(self._free)} are free")
        rest = len(self._free) - num_blocks
        taken = self._free[rest:][::-1]
        del self._free[rest:]
        self._counts[taken] = 1
        return taken

    def share(self, blocks: Sequence[int] | NDArray[np.int64]) -> None:
        ids = np.asarray(blocks, dtype=np.int64)
        assert (self._counts[ids] > 0).all(), "bug: a free block was shared"
        self._counts[ids] += 1

    def release(self, blocks: Sequence[int] | NDArray[np.int64]) -> None:
        """Blocks that become free are given again in this order: neighbours stay neighbours."""
        ids = np.asarray(blocks, dtype=np.int64)
        assert (self._counts[ids] > 0).all(), "bug: a free block was released"
        self._counts[ids] -= 1
        self._free.extend(ids[self._counts[ids] == 0][::-1].tolist())

    def check_integrity(self) -> None:
        """Asserts that the free list names exactly the blocks without a holder, each once."""
        assert len(set(self._free)) == len(self._free), "bug: a block is free twice"
        assert (self._counts >= 0).all(), "bug: a negative reference count"
        assert set(np.flatnonzero(self._counts == 0).tolist()) == set(self._free), (
            "bug: free list and reference counts disagree"
        )
