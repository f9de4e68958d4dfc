"""Which blocks are free, and how many hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable

from memkv.errors import PoolExhausted


class BlockPool:
    """Free list and reference counts of `num_blocks` blocks.

    A block is free (count 0) or held (count >= 1). `allocate` gives blocks with count 1, `share` adds a
    holder, `release` takes one away; at 0 the block is free again. Not thread-safe: its engine owns it.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "bug: a pool without blocks"
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest id is given first

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block: int) -> int:
        return self._counts[block]

    def allocate(self, num_blocks: int) -> list[int]:
        """All of `num_blocks` or none. Raises `PoolExhausted`."""
        assert num_blocks >= 0, "bug: negative number of blocks"
        if num_blocks > len(self._free):
            raise PoolExhausted(f"{num_blocks} blocks are needed and {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        assert all(self._counts[block] > 0 for block in blocks), "bug: a free block was shared"
        for block in blocks:
            self._counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._counts[block] > 0, "bug: a free block was released"
            self._counts[block] -= 1
            if self._counts[block] == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Asserts that the free list names exactly the blocks without a holder, each once."""
        assert len(set(self._free)) == len(self._free), "bug: a block is free twice"
        assert all(count >= 0 for count in self._counts), "bug: a negative reference count"
        unheld = {block for block, count in enumerate(self._counts) if count == 0}
        assert unheld == set(self._free), "bug: free list and reference counts disagree"
