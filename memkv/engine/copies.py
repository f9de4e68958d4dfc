"""Chunks on their way from host memory to the device, beside what it computes.

in host memory ──copy──► in place ──► ready: may be mapped
                └─ held meanwhile, here and there: nobody else gets its blocks
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from memkv.engine.host_pool import HostChunk, HostPool
from memkv.engine.kv_cache import KVCache
from memkv.engine.residency import Pin, Residency, ResidentChunk
from memkv.engine.stats import LaneCounters
from memkv.engine.stopwatch import Stopwatch
from memkv.engine.timeline import Timeline
from memkv.kv.chunk import ChunkKV


@dataclass(frozen=True, slots=True)
class _Copy:
    """Of `kv`, or of what the host pool holds."""

    chunk: ResidentChunk
    pin: Pin
    watch: Stopwatch
    kv: ChunkKV | None
    held: HostChunk | None
    forget: bool


class Copies:
    """Of one lane. Belongs to the engine's thread.

    Args:
        arrived: called for a chunk that is in place, with its KV where that is in host memory by itself.
        follow: has something done for a chunk behind the current work.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        host_pool: HostPool,
        residency: Residency,
        counters: LaneCounters,
        timeline: Timeline,
        *,
        arrived: Callable[[ResidentChunk, ChunkKV | None], None],
        follow: Callable[[ResidentChunk, Callable[[], None]], None],
    ) -> None:
        self._kv_cache = kv_cache
        self._host_pool = host_pool
        self._residency = residency
        self._counters = counters
        self._timeline = timeline
        self._arrived = arrived
        self._follow = follow
        self._under_way: deque[_Copy] = deque()

    def begin(
        self, chunk: ResidentChunk, *, held: HostChunk | None = None, kv: ChunkKV | None = None
    ) -> None:
        """Copies a reserved chunk from where the host pool holds it, or its KV; lets go when it is there."""
        if held is not None:
            watch = self._kv_cache.import_blocks(self._host_pool.storage, held.blocks, chunk.blocks)
        else:
            assert kv is not None
            watch = self._kv_cache.import_chunk(kv, chunk.blocks)
        self._timeline.watch("to the device", watch)
        copy = _Copy(chunk, self._residency.hold(chunk), watch, kv, held, chunk.dropped)
        if watch.is_over and not self._under_way:
            self._end(copy)
        else:
            self._under_way.append(copy)

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    def end(self, *, wait: bool = False) -> None:
        """Lets those go on whose chunks have arrived; `wait`: at least the first of them."""
        while self._under_way and (wait or self._under_way[0].watch.is_over):
            wait = False
            copy = self._under_way.popleft()
            copy.watch.wait()
            self._follow(copy.chunk, partial(self._end, copy))

    def _end(self, copy: _Copy) -> None:
        if copy.held is not None:
            self._counters.host_load_seconds += copy.watch.seconds()
            self._counters.host_loaded_bytes += len(copy.held.blocks) * self._host_pool.layout.bytes_per_block
            self._host_pool.let_go(copy.held, forget=copy.forget)
        try:
            self._arrived(copy.chunk, copy.kv)
        finally:
            copy.pin.release()
