"""Computing chunks behind their context: for an ingest, or because a query found one missing."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from memkv.engine.request import PrefillRequest
from memkv.engine.residency import ChunkRef, KVSource, Pin, Residency, ResidentChunk
from memkv.engine.token_run import TokenRun
from memkv.errors import MemKVError
from memkv.kv.block_table import BlockTable, Segment
from memkv.kv.chunk import ChunkKV


class ChunkFill:
    """The computation of one reserved chunk: its tokens behind the mapped context, without logits.

    Holds the context, not the chunk: when nobody waits for the chunk any more, the fill is `idle` and ends.

    Attributes:
        write_to: where the finished chunk is to be kept; None when a job collects it.
    """

    def __init__(
        self, chunk: ResidentChunk, context: Pin | None, block_size: int, write_to: KVSource | None
    ) -> None:
        self.chunk = chunk
        self.write_to = write_to
        self._context = context
        ref = chunk.ref
        table = BlockTable(block_size)
        for before in () if context is None else context.chunks:
            table.append(Segment(before.blocks, before.ref.num_tokens, 0, 0))
        start = ref.stored_position
        table.append(Segment(chunk.blocks, ref.num_tokens, start, start, private=True))
        self.run = TokenRun(table, ref.token_ids, range(start, start + ref.num_tokens))

    @property
    def can_run(self) -> bool:
        return not self.is_idle and (self._context is None or self._context.is_ready)

    @property
    def is_idle(self) -> bool:
        return self.chunk.pins == 0

    def stands_behind(self, chunk: ResidentChunk) -> bool:
        return self._context is not None and chunk in self._context.chunks

    def release(self) -> None:
        if self._context is not None:
            self._context.release()
            self._context = None


@dataclass(frozen=True, slots=True)
class Computed:
    """One chunk of a job is done."""

    index: int
    kv: ChunkKV


class PrefillJob:
    """Chunks for one blocked caller, started one by one as blocks allow.

    The caller reads `events`: one `Computed` for each chunk in any order, or an error and nothing more.
    """

    def __init__(self, request: PrefillRequest, source: KVSource, now: float) -> None:
        self.request = request
        self.source = source
        self.since = now  # when it last got blocks, or was submitted
        self.blocked_since: float | None = None  # when it first found too few
        self.events: queue.SimpleQueue[Computed | MemKVError] = queue.SimpleQueue()
        self.is_finished = False
        self.context_pin: Pin | None = None
        self.next_chunk = 0  # index of the first that is not started
        self._active: dict[int, Pin] = {}

    @property
    def context(self) -> ChunkRef:
        return self.request.context

    @property
    def strict(self) -> bool:
        return False

    @property
    def pins(self) -> tuple[Pin, ...]:
        held = () if self.context_pin is None else (self.context_pin,)
        return (*held, *self._active.values())

    @property
    def all_started(self) -> bool:
        return self.next_chunk == len(self.request.chunks)

    @property
    def is_done(self) -> bool:
        return self.all_started and not self._active

    @property
    def active_tokens(self) -> int:
        """Tokens of the chunks that are started and not collected."""
        return sum(chunk.ref.num_tokens for pin in self._active.values() for chunk in pin.chunks)

    def wanted(self) -> list[ChunkRef]:
        """What it has to pin next."""
        if self.context_pin is None and self.context.num_tokens:
            return [self.context]
        return [self.request.chunks[self.next_chunk]]

    def start_next(self, pin: Pin, now: float) -> None:
        """Takes the pin of `wanted()` over."""
        self.since = now
        self.blocked_since = None
        if self.context_pin is None and self.context.num_tokens:
            self.context_pin = pin
            return
        self._active[self.next_chunk] = pin
        self.next_chunk += 1

    def awaits(self, chunk: ResidentChunk) -> bool:
        return any(chunk in pin.chunks for pin in self._active.values())

    def collect(self, chunk: ResidentChunk, kv: ChunkKV) -> list[Computed]:
        """What a chunk that became ready means to this job. Its blocks become the first to be evicted."""
        found = [index for index, pin in self._active.items() if chunk in pin.chunks]
        for index in found:
            self._active.pop(index).release(cold=True)
        return [Computed(index, kv) for index in found]

    def release(self, residency: Residency) -> None:
        """Gives back every pin; the one way out. Doing it again does nothing."""
        for pin in self.pins:
            pin.release(cold=True)
        self._active.clear()
        self.context_pin = None
        self.next_chunk = len(self.request.chunks)
