"""One sequence's segments: which blocks stand at which positions.

    positions   0        P            P+n                    P+n+m
                | prefix | chunk A    | chunk B              | question, answer
    segments    [ shared ][ shared    ][ private ][ shared   ][ private          ]
                                        B's blocks 0..1 replaced by fresh ones

A key at stored position j of a segment stands at sequence position j + (position - stored_position);
queries that enter the segment rotate by the negative of that difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of contiguous positions over whole blocks, of which only the last may be partly filled.

    `position` and `stored_position` are those of the first token. Private segments are written by their
    own sequence at its absolute positions, so there both are equal.
    """

    blocks: tuple[int, ...]
    num_tokens: int
    position: int
    stored_position: int
    private: bool = False

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.position + self.num_tokens


class BlockTable:
    """Ordered segments whose positions never overlap; gaps are legal. Holds ids, not references."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._segments: list[Segment] = []

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def segments(self) -> Sequence[Segment]:
        """In order of position."""
        return self._segments

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self._segments)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self._segments[-1].end if self._segments else 0

    def private_blocks(self) -> list[int]:
        return [block for s in self._segments if s.private for block in s.blocks]

    def shared_blocks(self) -> list[int]:
        return [block for s in self._segments if not s.private for block in s.blocks]

    def append(self, segment: Segment) -> None:
        """Adds a segment behind all others."""
        assert segment.position >= self.end, "bug: segments overlap"
        self._check(segment)
        self._segments.append(segment)

    def grow(self, num_tokens: int, blocks: Sequence[int] = ()) -> None:
        """Adds tokens, and the blocks they need, to the last segment, which must be private."""
        last = self._segments[-1]
        assert last.private, "bug: only a private segment grows"
        grown = Segment(
            last.blocks + tuple(blocks),
            last.num_tokens + num_tokens,
            last.position,
            last.position,
            private=True,
        )
        self._check(grown)
        self._segments[-1] = grown

    def slot(self, position: int) -> int:
        """Where a position's key lives: block * block_size + offset. Raises KeyError in a gap."""
        for segment in reversed(self._segments):
            if segment.position <= position < segment.end:
                block, offset = divmod(position - segment.position, self._block_size)
                return segment.blocks[block] * self._block_size + offset
        raise KeyError(position)

    def check_integrity(self) -> None:
        end = 0
        private: set[int] = set()
        for segment in self._segments:
            self._check(segment)
            assert segment.position >= end, "bug: segments overlap"
            end = segment.end
            if segment.private:
                assert len(set(segment.blocks)) == len(segment.blocks) and private.isdisjoint(
                    segment.blocks
                ), "bug: a private block is mapped twice"
                private.update(segment.blocks)
        assert private.isdisjoint(self.shared_blocks()), "bug: a block is private and shared"

    def _check(self, segment: Segment) -> None:
        assert segment.num_tokens >= 0 and segment.position >= 0, "bug: negative tokens or position"
        assert len(segment.blocks) == -(-segment.num_tokens // self._block_size), (
            "bug: blocks and tokens disagree"
        )
        if segment.private:
            assert segment.position == segment.stored_position, "bug: a private segment is stored elsewhere"
