"""The tokens of one block table that are still to be computed, as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from memkv.kv.block_table import BlockTable

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class TokenRun:
    """The tokens of one block table that have to be computed, in order of position.

    The order is what lets a long run be taken in parts: when a token is computed, every private key that it
    sees is written. Arrays are made once, with room for what is appended.

    Args:
        token_ids: [num_tokens].
        positions: [num_tokens], ascending, in private segments of the table.
        room: how many tokens may be appended.

    Attributes:
        first_count: of tokens, before any was appended.
    """

    def __init__(
        self,
        table: BlockTable,
        token_ids: Sequence[int] | Int64s,
        positions: Sequence[int] | Int64s,
        room: int = 0,
    ) -> None:
        self.table = table
        self.done = 0
        self._count = self.first_count = len(token_ids)
        blocks = [segment.blocks for segment in table.segments]
        first = [0, *itertools.accumulate(map(len, blocks))]
        self._num_entries = first.pop()
        self._segments = np.array(
            [
                (entry, segment.num_tokens, segment.position, segment.stored_position)
                for entry, segment in zip(first, table.segments, strict=True)
            ],
            dtype=np.int32,
        )
        self._entries = np.empty(self._num_entries + -(-room // table.block_size), dtype=np.int32)
        self._entries[: self._num_entries] = list(itertools.chain.from_iterable(blocks))
        self._tokens = np.empty((3, self._count + room), dtype=np.int64)  # ids, positions, slots
        self._tokens[0, : self._count] = token_ids
        self._tokens[1, : self._count] = positions
        self._tokens[2, : self._count] = self._slots_of(self.positions)

    @classmethod
    def of_private(cls, table: BlockTable, ids: Int64s, room: int = 0) -> Self:
        """All tokens in private blocks of a table over the tokens `ids`."""
        private = [(each.position, each.num_tokens) for each in table.segments if each.private]
        starts, lengths = np.array(private, dtype=np.int64).T
        ends = lengths.cumsum()
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        return cls(table, ids[positions], positions, room)

    @property
    def token_ids(self) -> Int64s:
        """[num_tokens]"""
        return self._tokens[0, : self._count]

    @property
    def positions(self) -> Int64s:
        """[num_tokens]"""
        return self._tokens[1, : self._count]

    @property
    def slots(self) -> Int64s:
        """[num_tokens], block * block_size + offset."""
        return self._tokens[2, : self._count]

    @property
    def remaining(self) -> int:
        return self._count - self.done

    def visible(self, last: int) -> tuple[Int32s, Int32s]:
        """Segments up to position `last`: what lies behind it is not written yet, and nobody sees it.

        Returns:
            [n, 4] of (first entry, num_tokens, position, stored_position), and the blocks that entries name.
        """
        count = int(np.searchsorted(self._segments[:, 2], last, side="right"))
        segments = self._segments[:count]
        end = self._num_entries if count == len(self._segments) else self._segments[count, 0]
        unseen = segments[-1, 2] + segments[-1, 1] - (last + 1)
        if unseen > 0:
            segments = segments.copy()
            segments[-1, 1] -= unseen
        return segments, self._entries[:end]

    def append(self, token_id: int, blocks: Sequence[int] = ()) -> None:
        """One more token behind the last segment, and the block that it needs where the others are full."""
        self.table.grow(1, blocks)
        self._entries[self._num_entries : self._num_entries + len(blocks)] = blocks
        self._num_entries += len(blocks)
        self._segments[-1, 1] += 1
        position = self.table.end - 1
        offset = (position - self._segments[-1, 2]) % self.table.block_size
        slot = int(self._entries[self._num_entries - 1]) * self.table.block_size + offset
        self._tokens[:, self._count] = token_id, position, slot
        self._count += 1

    def resolve(self, index: int, token_id: int) -> None:
        """Says which token the one is that was appended at `index`."""
        self._tokens[0, self.first_count + index] = token_id

    def _slots_of(self, positions: Int64s) -> Int64s:
        starts = self._segments[:, 2]
        index = np.searchsorted(starts, positions, side="right") - 1
        block, offset = np.divmod(positions - starts[index], self.table.block_size)
        private = np.array([segment.private for segment in self.table.segments])
        assert (private[index] & (positions - starts[index] < self._segments[index, 1])).all(), (
            "bug: a shared block would be written"
        )
        slots: Int64s = self._entries[self._segments[index, 0] + block] * self.table.block_size + offset
        return slots
