"""Several engines over one store, each with a device, a pool and a thread of its own: data parallelism."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from memkv.engine.engine import Engine
from memkv.engine.generation import Generation
from memkv.engine.prefill import PrefillJob
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef, KVSource
from memkv.engine.stats import EngineStats
from memkv.errors import EngineClosed
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout

Outcome = TypeVar("Outcome")


class Engines:
    """Has the methods of an `Engine`. Any thread may use it.

    A generation goes to the engine that holds most tokens of its chunks, of equals to the one with the fewest
    requests, then to the emptiest; one that has as many requests as it runs at once is passed over while
    another has not. Chunks to prefill are dealt out evenly.

    Args:
        engines: of one model; at least one. They are closed with it.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self._closing = False

    def layout(self, block_size: int) -> KVLayout:
        return self._engines[0].layout(block_size)

    def generate(self, request: GenerateRequest, source: KVSource) -> Generation:
        self._require_open()
        return self._choose(request).generate(request, source)

    def prefill(
        self,
        context: ChunkRef,
        chunks: Iterable[ChunkRef],
        source: KVSource,
        *,
        block_size: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[ChunkKV]:
        self._require_open()
        wanted = list(chunks)
        engines = sorted(self._engines, key=lambda engine: engine.num_tasks)
        jobs: list[tuple[Engine, PrefillJob]] = []
        found: list[list[ChunkKV]] = []
        num_found = 0
        try:
            for index, engine in enumerate(engines):
                if own := wanted[index :: len(engines)]:
                    jobs.append((engine, engine.submit_prefill(context, own, source, block_size=block_size)))
            for engine, job in jobs:

                def tell(done: int, _: int, before: int = num_found) -> None:
                    if on_progress is not None:
                        on_progress(before + done, len(wanted))

                found.append(engine.collect(job, tell))
                num_found += len(found[-1])
        finally:
            for engine, job in jobs[len(found) :]:
                engine.cancel(job)
        return [found[index % len(found)][index // len(found)] for index in range(len(wanted))]

    def prefetch(
        self, refs: Iterable[ChunkRef], source: KVSource, *, block_size: int, to_host: bool = False
    ) -> None:
        """By the engine that a question about them would go to."""
        wanted = tuple(refs)
        chunks = [ref for ref in wanted if ref.context_ids]  # the prefix, which all share, says nothing
        engine = self._nearest(chunks, block_size)
        engine.prefetch(wanted, source, block_size=block_size, to_host=to_host)

    def is_idle(self) -> bool:
        """Whether all of them are."""
        return all(engine.is_idle() for engine in self._engines)

    @property
    def budgets(self) -> tuple[int, int]:
        """Of all of them."""
        pools, hosts = zip(*(engine.budgets for engine in self._engines), strict=True)
        return sum(pools), sum(hosts)

    def drop(self, input_keys: Iterable[str]) -> None:
        keys = tuple(input_keys)
        for engine in self._engines:
            engine.drop(keys)

    def stats(self) -> EngineStats:
        """Lanes of all of them; alive if all are."""
        stats = [engine.stats() for engine in self._engines]
        lanes = tuple(lane for each in stats for lane in each.lanes)
        return replace(stats[0], alive=all(each.alive for each in stats), lanes=lanes)

    def run(self, work: Callable[[], Outcome]) -> Outcome:
        """In the first one's thread."""
        return self._engines[0].run(work)

    def check_integrity(self) -> None:
        for engine in self._engines:
            engine.check_integrity()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, drain_seconds: float = 0.0) -> None:
        self._closing = True
        deadline = time.monotonic() + drain_seconds
        for engine in self._engines:
            engine.close(max(0.0, deadline - time.monotonic()))

    def _choose(self, request: GenerateRequest) -> Engine:
        refs = () if request.reuse == "off" else request.chunks
        return self._nearest(refs, request.block_size)

    def _nearest(self, refs: Sequence[ChunkRef], block_size: int) -> Engine:
        alive = [engine for engine in self._engines if engine.stats().alive] or self._engines
        free = [engine for engine in alive if engine.num_tasks < engine.max_running]

        def rank(engine: Engine) -> tuple[int, int, int]:
            used = sum(lane.blocks.total - lane.blocks.free for lane in engine.stats().lanes)
            return -engine.tokens_here(refs, block_size), engine.num_tasks, used

        return min(free or alive, key=rank)

    def _require_open(self) -> None:
        if self._closing:
            raise EngineClosed("the engines are closed")
