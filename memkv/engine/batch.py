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

import numpy as np
from torch import Tensor

from memkv.engine.reuse import LookRequest
from memkv.engine.token_run import Int32s, Int64s, TokenRun

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Part(Generic[Owner]):
    """The next `count` tokens of an owner's run; the last `num_logits` of them need logits.

    Attributes:
        look: what its owner wants to know of the attention of the last `look_rows` tokens.
        fed: where its one token is, when it was sampled on the device and has not come to the host: a row of
            sampled tokens.
    """

    owner: Owner
    run: TokenRun
    count: int
    num_logits: int = 0
    look: LookRequest | None = None
    look_rows: int = 0
    fed: tuple[Tensor, int] | None = None

    @property
    def positions(self) -> Int64s:
        return self.run.positions[self.run.done : self.run.done + self.count]

    @property
    def completes(self) -> bool:
        """Whether it takes all that is left of the run."""
        return self.count == self.run.remaining


@dataclass(frozen=True, slots=True)
class BatchLook:
    """Entries of the packed block tables whose attention mass is wanted: all those of one group of rows."""

    request: LookRequest
    entries: slice


@dataclass(frozen=True, slots=True)
class VisibleTable:
    """What a group's rows may see.

    Attributes:
        segments: [n, 4] of (first entry, num_tokens, position, stored_position).
        entries: the blocks that entries name.
    """

    segments: Int32s
    entries: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What the model runner needs, on the host.

    Attributes:
        token_ids: [total].
        positions: [num_groups] of the positions of each group's rows. An owner's rows are one group; two,
            where only the last of them look.
        slots: [total], block * block_size + offset.
        tables: [num_groups].
        logit_rows: rows of the packed row whose logits are wanted, ascending.
        looks: of the parts that look, in order.
        fed: sampled tokens on the device, int64 [n] each.
        sources: [total], -1, or which of the fed tokens, counted through, stands in a row.
    """

    token_ids: Int64s
    positions: list[Int64s]
    slots: Int64s
    tables: list[VisibleTable]
    logit_rows: list[int]
    looks: list[BatchLook]
    fed: list[Tensor]
    sources: Int64s

    @classmethod
    def build(cls, parts: Iterable[Part[Owner]]) -> Self:
        ids: list[Int64s] = []
        slots: list[Int64s] = []
        groups: list[Int64s] = []
        tables: list[VisibleTable] = []
        logit_rows: list[int] = []
        looks: list[BatchLook] = []
        fed: dict[int, tuple[Tensor, int]] = {}  # with the number of those in front
        sources: list[tuple[int, int]] = []
        num_rows = num_entries = num_fed = 0
        for part in parts:
            run, positions = part.run, part.positions
            ids.append(run.token_ids[run.done : run.done + part.count])
            slots.append(run.slots[run.done : run.done + part.count])
            cut = part.count - part.look_rows
            for group in (positions[:cut], positions[cut:]) if part.look_rows else (positions,):
                if len(group):
                    groups.append(group)
                    tables.append(VisibleTable(*run.visible(int(group[-1]))))
                    num_entries += len(tables[-1].entries)
            if part.look is not None and part.look_rows:
                own = len(tables[-1].entries)
                looks.append(BatchLook(part.look, slice(num_entries - own, num_entries)))
            if part.fed is not None:
                tokens, row = part.fed
                if id(tokens) not in fed:
                    fed[id(tokens)] = tokens, num_fed
                    num_fed += len(tokens)
                sources.append((num_rows, fed[id(tokens)][1] + row))
            num_rows += part.count
            logit_rows.extend(range(num_rows - part.num_logits, num_rows))
        of_rows = np.full(num_rows, -1, dtype=np.int64)
        for row, source in sources:
            of_rows[row] = source
        sampled = [tokens for tokens, _ in fed.values()]
        return cls(
            np.concatenate(ids), groups, np.concatenate(slots), tables, logit_rows, looks, sampled, of_rows
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def plan(self) -> dict[str, Int32s]:
        """The arrays of an `AttentionPlan`, by name."""
        num_segments = [len(table.segments) for table in self.tables]
        segments = np.concatenate([table.segments for table in self.tables])
        first_entry = _starts([len(table.entries) for table in self.tables])
        segments[:, 0] += np.repeat(first_entry[:-1], num_segments)
        return {
            "query_start": _starts([len(group) for group in self.positions]),
            "query_position": np.concatenate(self.positions, dtype=np.int32, casting="same_kind"),
            "segment_start": _starts(num_segments),
            "segments": segments,
            "block_ids": np.concatenate([table.entries for table in self.tables]),
        }


def _starts(counts: list[int]) -> Int32s:
    """[len(counts) + 1], where each begins and the last ends."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
