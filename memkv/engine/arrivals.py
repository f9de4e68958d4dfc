"""How chunks that are not resident come to be: read from their source, or computed.

reserved ──host pool──► in place ─────────────────────────────┐
   │  └───read────────► (host pool) ──► in place ──────────────┤
   │        └─ nothing there ──► healed: computed, written back ├──► ready: whoever waits goes on
   └──────── wanted by a job ──► computed ─────────────────────┘

What is computed comes to the host to be kept, and goes into the host pool from there: what the device evicts
later need not come from disk. What a job computes takes no more than free room there, until it is asked for.
What is prefetched is read before anybody waits for it: into blocks while nobody waits for blocks, otherwise,
or where that is asked for, into the host pool.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from memkv.engine.copies import Copies
from memkv.engine.failure import typed_error
from memkv.engine.host_pool import HostChunk, HostPool
from memkv.engine.kv_cache import Export, KVCache
from memkv.engine.loader import Loader, ReadOutcome
from memkv.engine.prefill import ChunkFill, PrefillJob
from memkv.engine.residency import ChunkRef, KVSource, Pin, Residency, ResidentChunk
from memkv.engine.scheduler import Scheduler, Task
from memkv.engine.sequence import Sequence
from memkv.engine.stats import LaneCounters
from memkv.engine.timeline import Timeline
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
        host_pool: HostPool,
        residency: Residency,
        scheduler: Scheduler,
        loader: Loader,
        agenda: Agenda,
        outbox: Outbox,
        counters: LaneCounters,
        timeline: Timeline,
        *,
        fail: Callable[[Task, MemKVError], None],
        finish: Callable[[PrefillJob], None],
        read_seconds: float,
    ) -> None:
        self.healed_chunks = 0  # had no valid KV when a query needed them
        self._kv_cache = kv_cache
        self._host_pool = host_pool
        self._residency = residency
        self._scheduler = scheduler
        self._loader = loader
        self._agenda = agenda
        self._outbox = outbox
        self._counters = counters
        self._timeline = timeline
        self._fail = fail
        self._finish = finish
        self._read_seconds = read_seconds
        self._reading: dict[ResidentChunk, float] = {}  # since when
        self._prefetched: dict[ResidentChunk, Pin] = {}  # until they are read
        self._exports: deque[tuple[list[ChunkFill], list[Pin], Export]] = deque()
        self._forgotten: set[str] = set()  # while they were fetched
        self._fetching: dict[str, list[Callable[[], None]]] = {}  # into the host pool; what follows
        self.copies = Copies(
            kv_cache, host_pool, residency, counters, timeline, arrived=self._ready, follow=self._follow
        )

    def expect(self, task: Task, pin: Pin) -> None:
        """Sees to it that the chunks of a pin that a task has just got become ready."""
        computes = isinstance(task, PrefillJob) and pin is not task.context_pin
        for chunk in pin.reserved:
            if computes:
                self._scheduler.fills.append(self._new_fill(chunk, task, heals=False))
            else:
                self._read(chunk, task.source, task)
        if computes and pin.is_ready:  # it was here already
            chunk = pin.chunks[0]
            self._collect(chunk, None)

    def prefetch(self, refs: Iterable[ChunkRef], source: KVSource, *, to_host: bool) -> None:
        """Starts to read what is neither here nor on its way, as far as there is room."""
        for ref in refs:
            if self._residency.knows(ref):
                continue
            if not (to_host or self._scheduler.waiting) and self._residency.fits([ref]):
                pin = self._residency.pin([ref])
                (chunk,) = pin.reserved
                self._prefetched[chunk] = pin
                self._read(chunk, source, None)
            elif self._host_pool.wants(ref) and ref.input_key not in self._fetching:
                self._fetch(ref, source)

    def complete(self, fills: list[ChunkFill]) -> None:
        """All tokens of these are computed, or submitted: their KV comes to the host."""
        for fill in fills:
            self._scheduler.fills.remove(fill)
            fill.release()
        wanted = [fill for fill in fills if not fill.is_idle]
        if wanted:
            chunks = [(fill.chunk.blocks, fill.chunk.ref.num_tokens) for fill in wanted]
            holds = [self._residency.hold(fill.chunk) for fill in wanted]
            self._exports.append((wanted, holds, self._kv_cache.export_chunks(chunks)))
        self.end_exports()

    @property
    def is_busy(self) -> bool:
        """Whether anything is read, or on its way to the host or from there to the device."""
        return bool(
            self._reading or self._prefetched or self._fetching or self._exports or self.copies.are_under_way
        )

    @property
    def is_exporting(self) -> bool:
        return bool(self._exports)

    def end_exports(self, *, wait: bool = False) -> None:
        """Hands out what has come to the host; `wait`: at least the first of it."""
        while self._exports and (wait or self._exports[0][2].is_over):
            wait = False
            fills, holds, export = self._exports.popleft()
            for index, (fill, hold) in enumerate(zip(fills, holds, strict=True)):
                exported = partial(self._exported, fill, hold, export, index)
                self._agenda.follow(Work(exported, partial(self._scheduler.waiters, fill.chunk)))

    def _exported(self, fill: ChunkFill, hold: Pin, export: Export, index: int) -> None:
        """Raises `ModelError` where its KV is not finite."""
        hold.release()
        if fill.is_idle:
            return
        chunk = fill.chunk
        kv = export.chunk(index)
        if fill.write_to is not None:
            self._loader.write(chunk.ref, fill.write_to, kv)
        if not chunk.dropped:
            self._keep_on_host(chunk.ref, kv, asked_for=fill.write_to is not None)
        self._ready(chunk, kv)

    def give_up_late_reads(self, now: float) -> None:
        late = now - self._read_seconds
        for chunk in [chunk for chunk, since in self._reading.items() if since <= late]:
            del self._reading[chunk]
            self._end_prefetch(chunk)
            for task in self._scheduler.waiters(chunk):
                error = ServiceUnavailableError(
                    f"stored KV could not be read within {self._read_seconds:g} seconds",
                    hint="check the disk that holds the store",
                )
                self._fail(task, error)

    def end_prefetches(self) -> None:
        """Gives up what is read before anybody waits for it."""
        for chunk in list(self._prefetched):
            self._end_prefetch(chunk)

    def drop(self, input_keys: set[str]) -> None:
        """Forgets chunks in host memory, those on their way there too."""
        self._host_pool.drop(input_keys)
        self._forgotten |= input_keys & self._fetching.keys()

    def next_deadline(self) -> float:
        """When `give_up_late_reads` may have something to do."""
        return min(self._reading.values(), default=float("inf")) + self._read_seconds

    def _read(self, chunk: ResidentChunk, source: KVSource, reader: Task | None) -> None:
        """Gets a chunk's KV for those who wait for it; `reader` is told where the source fails."""
        self._reading.pop(chunk, None)
        if chunk.pins == 0:  # nobody does any more: its blocks are others'
            return
        waiting = self._fetching.get(chunk.ref.input_key)
        held = self._host_pool.find(chunk.ref) if waiting is None else None
        if held is not None:
            self.copies.begin(chunk, held=held)
            self._end_prefetch(chunk)
            return
        self._reading[chunk] = time.monotonic()
        if waiting is not None:
            waiting.append(partial(self._read, chunk, source, reader))
            return

        def done(outcome: ReadOutcome) -> None:
            held = self._put(chunk.ref, outcome)
            if held is None and isinstance(outcome, ChunkKV):
                with suppress(MemoryError, RuntimeError):  # then the engine's thread tries, and says so
                    outcome = self._kv_cache.staged(outcome)
            loaded = partial(self._loaded, chunk, reader, outcome, held)
            with suppress(EngineClosed):  # nobody waits for it any more
                self._agenda.post(Work(loaded, partial(self._scheduler.waiters, chunk)))

        self._loader.read(chunk.ref, source, done)

    def _fetch(self, ref: ChunkRef, source: KVSource) -> None:
        """Reads a chunk into the host pool."""
        self._fetching[ref.input_key] = []

        def done(outcome: ReadOutcome) -> None:
            held = self._put(ref, outcome)
            with suppress(EngineClosed):
                self._agenda.post(Work(partial(self._fetched, ref, held), lambda: ()))

        self._loader.read(ref, source, done)

    def _put(self, ref: ChunkRef, outcome: ReadOutcome) -> HostChunk | None:
        """In a loader's thread: into the host pool what was read."""
        if not isinstance(outcome, ChunkKV):
            return None
        started = time.monotonic()
        held = self._host_pool.put(ref, outcome)
        if held is not None and self._timeline.is_on:
            self._timeline.note("to the host pool", started)
        return held

    def _keep_on_host(self, ref: ChunkRef, kv: ChunkKV, *, asked_for: bool) -> None:
        """Puts a chunk that was computed into the host pool."""
        if not self._host_pool.wants(ref, evict=asked_for) or ref.input_key in self._fetching:
            return
        self._fetching[ref.input_key] = []

        def put() -> None:
            held = self._host_pool.put(ref, kv, evict=asked_for)
            with suppress(EngineClosed):
                self._agenda.post(Work(partial(self._fetched, ref, held, cold=not asked_for), lambda: ()))

        self._loader.run(put)

    def _fetched(self, ref: ChunkRef, held: HostChunk | None, *, cold: bool = False) -> None:
        if held is not None:
            self._host_pool.let_go(held, forget=ref.input_key in self._forgotten, cold=cold)
        self._forgotten.discard(ref.input_key)
        for read in self._fetching.pop(ref.input_key):
            read()

    def _loaded(
        self, chunk: ResidentChunk, reader: Task | None, outcome: ReadOutcome, held: HostChunk | None
    ) -> None:
        """A read that `reader` asked for came back; others may wait for the same chunk."""
        since = self._reading.pop(chunk, None)
        if since is not None and isinstance(outcome, ChunkKV):
            self._counters.source_load_seconds += time.monotonic() - since
            self._counters.source_loaded_bytes += outcome.layout.bytes_for(outcome.num_tokens)
        if chunk.pins == 0:  # nobody does any more
            if held is not None:
                self._host_pool.let_go(held, forget=chunk.dropped)
            return
        if isinstance(outcome, Exception):
            if reader is not None and reader in self._scheduler.waiters(chunk):
                self._fail(reader, typed_error(outcome))
            for task in self._scheduler.waiters(chunk)[:1]:
                self._read(chunk, task.source, task)  # the next one's source may do better
        elif held is not None:
            self.copies.begin(chunk, held=held)
        elif outcome is not None and self._fits(chunk, outcome):
            self.copies.begin(chunk, kv=outcome)
        else:
            self._miss(chunk)
        self._end_prefetch(chunk)

    def _end_prefetch(self, chunk: ResidentChunk) -> None:
        pin = self._prefetched.pop(chunk, None)
        if pin is not None:
            pin.release()

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

    def _follow(self, chunk: ResidentChunk, work: Callable[[], None]) -> None:
        self._agenda.follow(Work(work, partial(self._scheduler.waiters, chunk)))

    def _ready(self, chunk: ResidentChunk, kv: ChunkKV | None) -> None:
        self._residency.ready(chunk)
        self._collect(chunk, kv)

    def _collect(self, chunk: ResidentChunk, kv: ChunkKV | None) -> None:
        """Gives a chunk that is ready, by its KV or else by what is in its blocks, to the jobs that asked."""
        for job in list(self._scheduler.jobs):
            if not job.awaits(chunk):
                continue
            if kv is None:
                kv = self._kv_cache.export_chunk(chunk.blocks, chunk.ref.num_tokens)
            for event in job.collect(chunk, kv):
                self._outbox.computed(job, event)
            if job.is_done:
                self._finish(job)

    def _fits(self, chunk: ResidentChunk, kv: ChunkKV) -> bool:
        fits = kv.layout == self._kv_cache.layout and kv.num_tokens == chunk.ref.num_tokens
        if not fits:
            _log.warning("KV of another shape was stored for chunk %s", chunk.ref.input_key)
        return fits
