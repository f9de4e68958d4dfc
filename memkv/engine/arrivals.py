"""How chunks that are not resident come to be: read from their source, or computed.

reserved ──read──► in place ──────────────────────────────────┐
   │        └─ nothing there ──► healed: computed, written back ├──► ready: whoever waits goes on
   └──────── wanted by a job ──► computed ─────────────────────┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from memkv.engine.failure import typed_error
from memkv.engine.kv_cache import KVCache
from memkv.engine.loader import Loader, ReadOutcome
from memkv.engine.prefill import ChunkFill, PrefillJob
from memkv.engine.residency import Pin, Residency, ResidentChunk
from memkv.engine.scheduler import Scheduler, Task
from memkv.engine.sequence import Sequence
from memkv.engine.work import Agenda, Outbox, Work
from memkv.errors import EngineClosed, MemKVError, ReuseUnavailable, ServiceUnavailableError
from memkv.kv.chunk import ChunkKV

_log = logging.getLogger(__name__)


class Arrivals:
    """The chunks of one lane that somebody waits for. Belongs to the engine's thread.

    Args:
        fail: ends a task with an error and gives its blocks back.
        finish: ends a job that has all its chunks.
        read_seconds: how long a read may take before those who wait for it fail.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        residency: Residency,
        scheduler: Scheduler,
        loader: Loader,
        agenda: Agenda,
        outbox: Outbox,
        *,
        fail: Callable[[Task, MemKVError], None],
        finish: Callable[[PrefillJob], None],
        read_seconds: float,
    ) -> None:
        self.healed_chunks = 0  # had no valid KV when a query needed them
        self._kv_cache = kv_cache
        self._residency = residency
        self._scheduler = scheduler
        self._loader = loader
        self._agenda = agenda
        self._outbox = outbox
        self._fail = fail
        self._finish = finish
        self._read_seconds = read_seconds
        self._reading: dict[ResidentChunk, float] = {}  # since when

    def expect(self, task: Task, pin: Pin) -> None:
        """Sees to it that the chunks of a pin that a task has just got become ready."""
        computes = isinstance(task, PrefillJob) and pin is not task.context_pin
        for chunk in pin.reserved:
            if computes:
                self._scheduler.fills.append(self._new_fill(chunk, task, heals=False))
            else:
                self._read(chunk, task)
        if computes and pin.is_ready:  # it was here already
            chunk = pin.chunks[0]
            self._collect(chunk, self._kv_cache.export_chunk(chunk.blocks, chunk.ref.num_tokens))

    def complete(self, fill: ChunkFill) -> None:
        """All tokens of a fill are computed. Raises `ModelError` where they are not finite."""
        self._scheduler.fills.remove(fill)
        fill.release()
        if fill.is_idle:
            return
        chunk = fill.chunk
        kv = self._kv_cache.export_chunk(chunk.blocks, chunk.ref.num_tokens)
        if fill.write_to is not None:
            self._loader.write(chunk.ref, fill.write_to, kv)
        self._ready(chunk, kv)

    def give_up_late_reads(self, now: float) -> None:
        late = now - self._read_seconds
        for chunk in [chunk for chunk, since in self._reading.items() if since <= late]:
            del self._reading[chunk]
            for task in self._scheduler.waiters(chunk):
                error = ServiceUnavailableError(
                    f"stored KV could not be read within {self._read_seconds:g} seconds",
                    hint="check the disk that holds the store",
                )
                self._fail(task, error)

    def next_deadline(self) -> float:
        """When `give_up_late_reads` may have something to do."""
        return min(self._reading.values(), default=float("inf")) + self._read_seconds

    def _read(self, chunk: ResidentChunk, task: Task) -> None:
        self._reading[chunk] = time.monotonic()

        def done(outcome: ReadOutcome) -> None:
            work = Work(partial(self._loaded, chunk, task, outcome), partial(self._scheduler.waiters, chunk))
            with suppress(EngineClosed):  # nobody waits for it any more
                self._agenda.post(work)

        self._loader.read(chunk.ref, task.source, done)

    def _loaded(self, chunk: ResidentChunk, reader: Task, outcome: ReadOutcome) -> None:
        """A read that `reader` asked for came back; others may wait for the same chunk."""
        self._reading.pop(chunk, None)
        if chunk.pins == 0:
            return  # nobody does any more
        if isinstance(outcome, Exception):
            if reader in self._scheduler.waiters(chunk):
                self._fail(reader, typed_error(outcome))
            for task in self._scheduler.waiters(chunk)[:1]:
                self._read(chunk, task)  # the next one's source may do better
        elif outcome is not None and self._fits(chunk, outcome):
            self._kv_cache.import_chunk(outcome, chunk.blocks)
            self._ready(chunk, outcome)
        else:
            self._miss(chunk)

    def _miss(self, chunk: ResidentChunk) -> None:
        """There is no KV to map: who insists on it fails, the others get it computed."""
        for task in self._scheduler.waiters(chunk):
            if task.strict:
                error = ReuseUnavailable(
                    f"chunk {chunk.ref.input_key[:16]} has no valid KV, and reuse is strict",
                    hint="ask again with reuse = auto, which prefills what is missing",
                )
                self._fail(task, error)
        for task in self._scheduler.waiters(chunk)[:1]:
            if isinstance(task, Sequence):
                self.healed_chunks += 1
                task.heal(chunk)
            self._scheduler.fills.append(self._new_fill(chunk, task, heals=True))

    def _new_fill(self, chunk: ResidentChunk, task: Task, *, heals: bool) -> ChunkFill:
        context = None
        if chunk.ref.context_ids:
            held = next(each for pin in task.pins for each in pin.chunks if each.ref == task.context)
            context = self._residency.hold(held)
        block_size = self._kv_cache.layout.block_size
        return ChunkFill(chunk, context, block_size, task.source if heals else None)

    def _ready(self, chunk: ResidentChunk, kv: ChunkKV) -> None:
        self._residency.ready(chunk)
        self._collect(chunk, kv)

    def _collect(self, chunk: ResidentChunk, kv: ChunkKV) -> None:
        """Gives a chunk that is ready to the jobs that asked for it."""
        for job in list(self._scheduler.jobs):
            for event in job.collect(chunk, kv):
                self._outbox.computed(job, event)
            if job.is_done:
                self._finish(job)

    def _fits(self, chunk: ResidentChunk, kv: ChunkKV) -> bool:
        fits = kv.layout == self._kv_cache.layout and kv.num_tokens == chunk.ref.num_tokens
        if not fits:
            _log.warning("KV of another shape was stored for chunk %s", chunk.ref.input_key)
        return fits
