"""What the kernels are told: the integers of one step, and how a layer rotates.

    sequence   0              1
    rows of q  |0 1 2 3 4|    |5|                        query_start   = [0, 5, 6]
    segments   A(54) B(97)    A(54) C(0)                 segment_start = [0, 2, 4]

    segment    first entry ──► block_ids     num_tokens   position   stored_position
      A        0   [7 2 9 4]                 54           0          0
      B        4   [1 8 3 5 6 0 12]          97           54         31
      A        11  [7 2 9 4]                 54           16         0          the same blocks, elsewhere
      C        15  []                        0            70         70

A segment's blocks are full but for the last, so that token `i` stands in entry `first + i // block_size`. Its
key was rotated at `stored_position + i` and is to count as one at `position + i`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from memkv.errors import KernelArgumentError

SegmentInts = tuple[Sequence[int], int, int, int]  # blocks, num_tokens, position, stored_position

_LAST_POSITION = 2**31 - 1
_TENSORS = {"query_start": 1, "query_position": 1, "segment_start": 1, "segments": 2, "block_ids": 1}  # dims


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The RoPE of a layer, as far as moving a key needs it. Let layers that rotate alike share one object.

    Attributes:
        inv_freq: float64 [rotary_dim / 2], radians per position. Scaled cos and sin (YaRN's attention factor)
            are not part of it: the move is a pure rotation.
        interleaved: pairs are (2i, 2i + 1), as in GPT-J; otherwise (i, i + rotary_dim / 2), as in GPT-NeoX.
    """

    inv_freq: Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.inv_freq.dim() != 1 or self.inv_freq.dtype != torch.float64 or self.inv_freq.numel() == 0:
            raise KernelArgumentError(
                f"inv_freq is {self.inv_freq.dtype} {list(self.inv_freq.shape)}, not float64 [rotary_dim / 2]"
            )

    @property
    def rotary_dim(self) -> int:
        return 2 * self.inv_freq.numel()


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """What `paged_attention` returns.

    Attributes:
        out: [num_tokens, num_heads, head_dim], q's dtype. Rows that see no key are 0.
        lse: [num_tokens, num_heads] float32, log of the sum of exp(score); -inf for rows that see no key.
        block_mass: [num_heads, num_entries] float32: softmax mass that each entry of `plan.block_ids`
            received, summed over the query rows of its sequence.
    """

    out: Tensor
    lse: Tensor | None = None
    block_mass: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """One step's integers, the same for all layers: int32, contiguous, all on one device.

    Attributes:
        query_start: [num_seqs + 1], rows of q that each sequence owns.
        query_position: [num_tokens], absolute position of each row; any order, holes allowed.
        segment_start: [num_seqs + 1], rows of `segments` that each sequence owns.
        segments: [num_segments, 4]: first entry in `block_ids`, num_tokens, position, stored_position.
        block_ids: [num_entries]. Entries past those that a segment needs may hold anything; no two segments
            share an entry, though they may name the same block.
        may_share: False where no sequences are to read blocks together.
    """

    query_start: Tensor
    query_position: Tensor
    segment_start: Tensor
    segments: Tensor
    block_ids: Tensor
    may_share: bool = True
    derived: dict[object, Any] = field(default_factory=dict, init=False, repr=False)  # a device's own
    _host: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    _turns: dict[Rotation, Tensor] = field(default_factory=dict, init=False, repr=False)
    _stale_turns: dict[Rotation, Tensor] = field(default_factory=dict, init=False, repr=False)
    _fits: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)  # blocks, their size
    _changes: set[str] = field(default_factory=set, init=False, repr=False)  # tensors changed in place

    def __post_init__(self) -> None:
        for name, dim in _TENSORS.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.dim() != dim or not tensor.is_contiguous():
                raise KernelArgumentError(
                    f"plan.{name} is {tensor.dtype} {list(tensor.shape)}, not contiguous {dim}-D int32"
                )
            if tensor.device != self.query_start.device:
                raise KernelArgumentError(f"plan.{name} is on {tensor.device}, query_start on {self.device}")
        if self.segments.shape[1] != 4:
            raise KernelArgumentError(f"plan.segments is {list(self.segments.shape)}, not [num_segments, 4]")
        if self.query_start.numel() < 1 or self.query_start.shape != self.segment_start.shape:
            raise KernelArgumentError(
                f"plan.query_start {list(self.query_start.shape)} and segment_start "
                f"{list(self.segment_start.shape)} are not both [num_seqs + 1]"
            )

    @classmethod
    def build(
        cls,
        tables: Sequence[Sequence[SegmentInts]],
        query_positions: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Self:
        """A plan from each sequence's segments, as SegmentInts, and the positions of its query rows."""
        if len(tables) != len(query_positions):
            raise KernelArgumentError(
                f"{len(tables)} block tables but query positions of {len(query_positions)}"
            )
        entries: list[int] = []
        segments: list[tuple[int, int, int, int]] = []
        segment_start = [0]
        for table in tables:
            for blocks, num_tokens, position, stored_position in table:
                segments.append((len(entries), num_tokens, position, stored_position))
                entries.extend(blocks)
            segment_start.append(len(segments))
        query_start = np.cumsum([0, *(len(positions) for positions in query_positions)])
        flat_positions = [position for positions in query_positions for position in positions]

        host = {
            "query_start": np.array(query_start, dtype=np.int32),
            "query_position": np.array(flat_positions, dtype=np.int32),
            "segment_start": np.array(segment_start, dtype=np.int32),
            "segments": np.array(segments, dtype=np.int32).reshape(-1, 4),
            "block_ids": np.array(entries, dtype=np.int32),
        }
        moved = {name: torch.from_numpy(values).to(device) for name, values in host.items()}
        return cls.of_arrays(host, moved)

    @classmethod
    def of_arrays(cls, host: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor]) -> Self:
        """A plan from int32 arrays by name, and the same on a device."""
        plan = cls(*_in_order(tensors))
        plan._host.update(host)  # so that nothing has to come back from a GPU to be checked
        return plan

    @classmethod
    def of_changing(
        cls,
        query_start: np.ndarray,
        tensors: Mapping[str, Tensor],
        *,
        num_blocks: int,
        block_size: int,
        may_share: bool,
    ) -> Self:
        """A plan whose tensors get other contents, query_start excepted, before each use: see `refresh`.

        The contents are trusted to fit a pool of `num_blocks`. Segments and entries past those that sequences
        own hold anything.
        """
        plan = cls(*_in_order(tensors), may_share=may_share)
        plan._host["query_start"] = query_start
        plan._fits.add((num_blocks, block_size))
        plan.refresh()
        return plan

    @property
    def device(self) -> torch.device:
        return self.query_start.device

    @property
    def num_seqs(self) -> int:
        return self.query_start.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.query_position.numel()

    @property
    def num_segments(self) -> int:
        return self.segments.shape[0]

    @property
    def num_entries(self) -> int:
        return self.block_ids.numel()

    def validate(self, num_blocks: int, block_size: int) -> None:
        """Check every bound that the kernels rely on; what was found good is not checked again.

        Raises:
            KernelArgumentError: rows, segments, entries or block ids are out of range.
        """
        if (num_blocks, block_size) in self._fits:
            return
        _check_starts("query_start", self._on_host("query_start"), self.num_tokens)
        _check_starts("segment_start", self._on_host("segment_start"), self.num_segments)
        segments = self._on_host("segments").astype(np.int64)
        first, num_tokens, position, stored_position = segments.T
        needed = -(-num_tokens // block_size)
        for name, wrong in {
            "a negative number of tokens": num_tokens < 0,
            f"entries outside block_ids [{self.num_entries}]": (first < 0)
            | (first + needed > self.num_entries),
            "positions outside [0, 2**31)": (position < 0) | (position + num_tokens > _LAST_POSITION),
            "stored positions outside [0, 2**31)": (stored_position < 0)
            | (stored_position + num_tokens > _LAST_POSITION),
        }.items():
            if wrong.any():
                index = int(wrong.argmax())
                raise KernelArgumentError(f"segment {index} has {name}: {segments[index].tolist()}")
        size = self.num_entries + 1
        begin, end = (np.bincount(at[needed > 0], minlength=size) for at in (first, first + needed))
        uses = (begin - end)[:-1].cumsum()  # of each entry, by segments
        ids = self._on_host("block_ids")
        for name, wrong in {
            "belongs to two segments": uses > 1,
            f"names a block outside the pool of {num_blocks}": (uses > 0) & ((ids < 0) | (ids >= num_blocks)),
        }.items():
            if wrong.any():
                entry = int(wrong.argmax())
                raise KernelArgumentError(f"entry {entry} of block_ids, {ids[entry]}, {name}")
        self._fits.add((num_blocks, block_size))

    def turns(self, rotation: Rotation) -> Tensor:
        """cos and sin of -(position - stored_position) * inv_freq: float32 [num_segments, 2, rotary_dim / 2].

        Angles are float64, so that an offset of 131,071 keeps float32's digits. Kept for the plan's life.
        """
        found = self.kept_turns(rotation)
        if found is None:
            offset = (self.segments[:, 3] - self.segments[:, 2]).double()
            angle = offset[:, None] * rotation.inv_freq.to(self.device)
            found = torch.stack((angle.cos(), angle.sin()), dim=1).float().contiguous()
            self.keep_turns(rotation, found)
        return found

    def refresh(self) -> None:
        """Says that the tensors' contents were changed in place, query_start excepted.

        What was derived from them is derived again at its next use, into the same memory: inside a captured
        CUDA graph this puts the planning into the graph. The new contents are trusted, not validated. A plan
        that is refreshed before its first use is taken for one whose sequences may share blocks.
        """
        self._changes.update(("query_position", "segment_start", "segments", "block_ids"))
        self._stale_turns.update(self._turns)
        self._turns.clear()
        for works in self.derived.values():
            for work in works if isinstance(works, list) else [works]:
                work.planned = False

    def query_counts(self) -> list[int]:
        """Query rows of each sequence."""
        counts: list[int] = np.diff(self._on_host("query_start")).tolist()
        return counts

    def segments_by_blocks(self, max_tokens: int) -> dict[tuple[int, int], int] | None:
        """How many segments have the same first block and number of tokens; None where that changes in place.

        Counted are those of sequences with 1 .. `max_tokens` query rows.
        """
        if self._changes:
            return None
        counts = np.diff(self._on_host("query_start"))
        owned = np.diff(self._on_host("segment_start"))
        segments = self._on_host("segments")[np.repeat((counts > 0) & (counts <= max_tokens), owned)]
        segments = segments[segments[:, 1] > 0]
        first = self._on_host("block_ids")[segments[:, 0]]
        keys, found = np.unique(np.stack((first, segments[:, 1]), 1), axis=0, return_counts=True)
        return {(int(block), int(tokens)): int(n) for (block, tokens), n in zip(keys, found, strict=True)}

    def kept_turns(self, rotation: Rotation) -> Tensor | None:
        return self._turns.get(rotation)

    def turns_memory(self, rotation: Rotation) -> Tensor | None:
        """Where turns that are no longer true were kept."""
        return self._stale_turns.get(rotation)

    def keep_turns(self, rotation: Rotation, turns: Tensor) -> None:
        self._turns[rotation] = turns

    def _on_host(self, name: str) -> np.ndarray:
        if name not in self._host:
            tensor: Tensor = getattr(self, name)
            self._host[name] = tensor.cpu().numpy()
        return self._host[name]


def _in_order(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    first, second, third, fourth, last = (tensors[name] for name in _TENSORS)
    return first, second, third, fourth, last


def _check_starts(name: str, values: np.ndarray, end: int) -> None:
    if values[0] != 0 or values[-1] != end or (np.diff(values) < 0).any():
        raise KernelArgumentError(f"plan.{name} does not rise from 0 to {end}: {values.tolist()[:8]}")
