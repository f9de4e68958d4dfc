"""One step's tokens: parts of several token runs in one packed row.

row         0 1 2 3 4 | 5 | 6 7 8 ...
owner       sequence A | B | C
positions   any, ascending within an owner
entries     blocks of A's table | of B's | of C's        what attention mass is counted by
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from memkv.engine.reuse import LookRequest
from memkv.engine.token_run import TokenRun
from memkv.kv.block_table import BlockTable

Owner = TypeVar("Owner")
SegmentInts = tuple[tuple[int, ...], int, int, int]  # blocks, num_tokens, position, stored_position


@dataclass(frozen=True, slots=True)
class Part(Generic[Owner]):
    """The next `count` tokens of an owner's run; the last `num_logits` of them need logits.

    Attributes:
        look: what its owner wants to know of the attention of the last `look_rows` tokens.
    """

    owner: Owner
    run: TokenRun
    count: int
    num_logits: int = 0
    look: LookRequest | None = None
    look_rows: int = 0

    @property
    def positions(self) -> list[int]:
        return self.run.positions[self.run.done : self.run.done + self.count]

    @property
    def completes(self) -> bool:
        """Whether it takes all that is left of the run."""
        return self.count == self.run.remaining


@dataclass(frozen=True, slots=True)
class BatchLook:
    """Entries of the packed block tables whose attention mass is wanted: all those of one group of rows."""

    request: LookRequest
    first_entry: int
    num_entries: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model runner needs, as plain integers.

    Attributes:
        token_ids: [total].
        positions: [num_groups] of the positions of each group's rows. An owner's rows are one group; two,
            where only the last of them look.
        slots: [total], block * block_size + offset.
        tables: [num_groups] of the segments each group's rows may see.
        logit_rows: rows of the packed row whose logits are wanted, ascending.
        looks: of the parts that look, in order.
    """

    token_ids: list[int]
    positions: list[list[int]]
    slots: list[int]
    tables: list[list[SegmentInts]]
    logit_rows: list[int]
    looks: list[BatchLook]

    @classmethod
    def build(cls, parts: Iterable[Part[Owner]]) -> Self:
        batch = cls([], [], [], [], [], [])
        num_entries = 0
        for part in parts:
            run, positions = part.run, part.positions
            batch.token_ids.extend(run.token_ids[run.done : run.done + part.count])
            batch.slots.extend(_slots(run.table, positions))
            cut = part.count - part.look_rows
            for group in (positions[:cut], positions[cut:]) if part.look_rows else (positions,):
                if group:
                    batch.positions.append(group)
                    batch.tables.append(_visible(run.table, group[-1]))
                    num_entries += sum(len(segment[0]) for segment in batch.tables[-1])
            if part.look is not None and part.look_rows:
                own = sum(len(segment[0]) for segment in batch.tables[-1])
                batch.looks.append(BatchLook(part.look, num_entries - own, own))
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
