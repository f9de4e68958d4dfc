"""Runs that ended sequences leave behind: prompt tokens and answers whose whole context was exact.

    first     | prefix | chunk A | chunk B, question, answer   |          the run that it leaves
    again     | prefix | chunk A | chunk B, question |.|                  mapped but for one token
    another   | prefix | chunk A | chunk B, | question, answer |          as far as the tokens agree
    next turn | prefix | chunk A | chunk B, question, answer   | text, answer |     and so on

A run is a resident chunk whose context is everything before it, so it is pinned, evicted and accounted for as
chunks are. It is found by its prefix, its place and a hash of the tokens before it, which are then compared,
and used for as many of its own tokens as are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_64

from memkv.engine.placement import MappedPiece
from memkv.engine.residency import ChunkRef, Residency, ResidentChunk
from memkv.engine.token_run import Int32s, Int64s
from memkv.kv.block_table import Segment


@dataclass(frozen=True, slots=True, eq=False)
class PromptOrigin:
    """What a prompt is made from.

    Attributes:
        prefix_key: stands for tenant, fingerprint and prefix.
        chunk_keys: of its chunks, in prompt order.
    """

    prefix_key: str
    chunk_keys: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.prefix_key, *self.chunk_keys)


class Continuations:
    """The runs of one lane. Belongs to the engine's thread.

    Args:
        max_blocks: of all runs together; 0 keeps none.
        block_size: the fewest new tokens that make a run worth keeping.
    """

    def __init__(self, residency: Residency, max_blocks: int, block_size: int) -> None:
        self._residency = residency
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._runs: OrderedDict[str, _Run] = OrderedDict()  # coldest first; dropped ones linger until swept
        self._places: dict[str, dict[int, list[_Place]]] = {}  # prefix key -> position -> what begins there
        self._objects = np.empty(0, dtype=object)  # each id's one: a known token takes 8 bytes, not 36
        self._num_kept = 0  # ever

    def find(self, prefix_key: str, ids: Int64s, start: int, end: int) -> list[MappedPiece]:
        """Runs that together hold the longest known beginning of ids[start:end], in order, without gaps."""
        by_position = self._places.get(prefix_key, {})
        steps: list[tuple[int, int, _Run]] = []  # from, to: each reaches farther than those before it
        reach = start
        hashed, state = 0, xxh3_64()
        for position in sorted(position for position in by_position if position >= start):
            if not position <= reach < end:
                break
            state.update(ids[hashed:position].tobytes())
            hashed = position
            for place in by_position[position]:
                holds = place.hash == state.intdigest() and np.array_equal(place.ids, ids[:position])
                best = place.longest(ids, end) if holds else None
                if best is not None and best[0] > reach:
                    reach, run = best
                    steps.append((position, reach, run))
        return [
            MappedPiece(run.chunk.ref, first, last - first, exact=True)
            for first, last, run in _shortest_chain(steps)
        ]

    def keep(self, origin: PromptOrigin, ids: Int64s, run: Segment, start: int) -> bool:
        """Takes the blocks of a sequence's last run over, unless they would be of little use or too many.

        Args:
            ids: of the prompt and answer, up to the run's end at least.
            run: private, computed throughout.
            start: where runs for this prompt may begin; what others hold from there on is not kept twice.
        """
        self._sweep()
        found = self.find(origin.prefix_key, ids, start, run.end)
        num_new = run.end - max(found[-1].end if found else 0, run.position)
        if num_new < self._block_size or not self._make_room(len(run.blocks)):
            return False
        place = self._place(origin.prefix_key, ids[: run.position])
        self._num_kept += 1
        own = ids[run.position : run.end]
        ref = ChunkRef(f"run {self._num_kept}", place.tokens, self._tokens(own))
        kept = _Run(self._residency.adopt(ref, run.blocks), origin, place, own.astype(np.int32))
        place.runs.append(kept)
        self._runs[ref.input_key] = kept
        self.touch(piece.ref.input_key for piece in found)
        return True

    def touch(self, keys: Iterable[str]) -> None:
        """Notes that these are in use; of a chain, what stands in front is evicted last."""
        for key in reversed(list(keys)):
            if key in self._runs:
                self._runs.move_to_end(key)

    def drop(self, input_keys: Iterable[str]) -> None:
        """Forgets the runs of prompts that were made from any of these."""
        dropped = set(input_keys)
        made = [run for run in self._runs.values() if not dropped.isdisjoint(run.origin.keys)]
        self._residency.drop(run.chunk.ref.input_key for run in made)
        self._sweep()

    def chunk_orders(self, prefix_key: str) -> list[tuple[str, ...]]:
        """The chunks of each prompt that left a run, the one used last first; each order once."""
        alive = [run for run in reversed(self._runs.values()) if not run.chunk.dropped]
        return list(dict.fromkeys(r.origin.chunk_keys for r in alive if r.origin.prefix_key == prefix_key))

    @property
    def num_blocks(self) -> int:
        return self._residency.num_adopted_blocks

    def check_integrity(self) -> None:
        everywhere = [there for by_position in self._places.values() for there in by_position.values()]
        placed = [run for there in everywhere for place in there for run in place.runs]
        for run in placed:
            assert self._runs[run.chunk.ref.input_key] is run, "bug: a run is mislaid"
        assert self.num_blocks <= self._max_blocks, "bug: runs exceed their budget"

    def _make_room(self, num_blocks: int) -> bool:
        """Drops the coldest runs that nobody maps until so many blocks fit."""
        spare = self._max_blocks - self.num_blocks
        victims = []
        for key, run in self._runs.items():
            if spare >= num_blocks:
                break
            if run.chunk.pins == 0:
                victims.append(key)
                spare += len(run.chunk.blocks)
        if spare < num_blocks:
            return False
        self._residency.drop(victims)
        self._sweep()
        return True

    def _sweep(self) -> None:
        """Takes out the runs whose blocks have gone, to whoever needed room."""
        for key in [key for key, run in self._runs.items() if run.chunk.dropped]:
            run = self._runs.pop(key)
            place = run.place
            place.runs.remove(run)
            if not place.runs:
                self._there(place.prefix_key, len(place.ids)).remove(place)
                self._forget_empty(place.prefix_key, len(place.ids))

    def _forget_empty(self, prefix_key: str, position: int) -> None:
        by_position = self._places[prefix_key]
        if not by_position[position]:
            del by_position[position]
        if not by_position:
            del self._places[prefix_key]

    def _place(self, prefix_key: str, before: Int64s) -> _Place:
        """The place behind these tokens, made where there is none."""
        there = self._there(prefix_key, len(before))
        place = next((place for place in there if np.array_equal(place.ids, before)), None)
        if place is None:
            digest = xxh3_64(before.tobytes()).intdigest()
            place = _Place(prefix_key, before.astype(np.int32), self._tokens(before), digest)
            there.append(place)
        return place

    def _tokens(self, ids: Int64s) -> tuple[int, ...]:
        if len(ids) and ids.max() >= len(self._objects):
            known = len(self._objects)
            more = np.arange(known, max(2 * known, int(ids.max()) + 1)).astype(object)
            self._objects = np.concatenate((self._objects, more))
        return tuple(self._objects[ids])

    def _there(self, prefix_key: str, position: int) -> list[_Place]:
        """The places at one position behind one prefix."""
        return self._places.setdefault(prefix_key, {}).setdefault(position, [])


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    chunk: ResidentChunk
    origin: PromptOrigin
    place: _Place
    ids: Int32s


@dataclass(slots=True, eq=False)
class _Place:
    """Runs that stand behind exactly these tokens, the prefix's included."""

    prefix_key: str
    ids: Int32s
    tokens: tuple[int, ...]  # the same
    hash: int
    runs: list[_Run] = field(default_factory=list)

    def longest(self, ids: Int64s, end: int) -> tuple[int, _Run] | None:
        """Where the run that agrees longest with `ids` ends, and that run."""
        start = len(self.ids)
        asked = ids[start:end]
        found = None
        for run in self.runs:
            if run.chunk.dropped:
                continue
            length = min(len(run.ids), len(asked))
            differs = run.ids[:length] != asked[:length]
            agreed = start + (int(differs.argmax()) if differs.any() else length)
            if agreed > start and (found is None or agreed > found[0]):
                found = agreed, run
        return found


def _shortest_chain(steps: Sequence[tuple[int, int, _Run]]) -> list[tuple[int, int, _Run]]:
    """Few of these spans that together cover all of them, each cut where the next one begins."""
    chain: list[tuple[int, int, _Run]] = []
    start, end = (steps[0][0], steps[-1][1]) if steps else (0, 0)
    while end > start:
        first, _, run = next(step for step in steps if step[1] >= end)  # of those, the one that begins first
        chain.append((first, end, run))
        end = first
    return chain[::-1]
