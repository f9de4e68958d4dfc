"""One step's tokens: parts of several token runs in one packed row.

row         0 1 2 3 4 | 5 | 6 7 8 ...
owner       sequence A | B | C
positions   any, ascending within an owner
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from memkv.engine.sequence import TokenRun
from memkv.kv.block_table import BlockTable

Owner = TypeVar("Owner")
SegmentInts = tuple[tuple[int, ...], int, int, int]  # blocks, num_tokens, position, stored_position


@dataclass(frozen=True, slots=True)
class Part(Generic[Owner]):
    """The next `count` tokens of an owner's run; the last `num_logits` of them need logits."""

    owner: Owner
    run: TokenRun
    count: int
    num_logits: int = 0

    @property
    def positions(self) -> list[int]:
        return self.run.positions[self.run.done : self.run.done + self.count]

    @property
    def completes(self) -> bool:
        """Whether it takes all that is left of the run."""
        return self.count == self.run.remaining


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model runner needs, as plain integers.

    Attributes:
        token_ids: [total].
        positions: [num_owners] of the positions of each owner's rows.
        slots: [total], block * block_size + offset.
        tables: [num_owners] of the segments each owner's rows may see.
        logit_rows: rows of the packed row whose logits are wanted, ascending.
    """

    token_ids: list[int]
    positions: list[list[int]]
    slots: list[int]
    tables: list[list[SegmentInts]]
    logit_rows: list[int]

    @classmethod
    def build(cls, parts: Iterable[Part[Owner]]) -> Self:
        batch = cls([], [], [], [], [])
        for part in parts:
            run, positions = part.run, part.positions
            batch.token_ids.extend(run.token_ids[run.done : run.done + part.count])
            batch.positions.append(positions)
            batch.slots.extend(_slots(run.table, positions))
            batch.tables.append(_visible(run.table, positions[-1]))
            rows = len(batch.token_ids)
            batch.logit_rows.extend(range(rows - part.num_logits, rows))
        return batch

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def _slots(table: BlockTable, positions: list[int]) -> list[int]:
    """Slots of ascending positions: the segments are walked once."""
    size = table.block_size
    slots: list[int] = []
    segments = iter(table.segments)
    segment = next(segments)
    for position in positions:
        while position >= segment.end:
            segment = next(segments)
        assert segment.private and position >= segment.position, "bug: a shared block would be written"
        block, offset = divmod(position - segment.position, size)
        slots.append(segment.blocks[block] * size + offset)
    return slots


def _visible(table: BlockTable, last: int) -> list[SegmentInts]:
    """The segments up to position `last`: what lies behind it is not written yet, and nobody sees it."""
    return [
        (
            segment.blocks,
            min(segment.num_tokens, last + 1 - segment.position),
            segment.position,
            segment.stored_position,
        )
        for segment in table.segments
        if segment.position <= last
    ]
