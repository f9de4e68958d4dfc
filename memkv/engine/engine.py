"""The engine: one thread that owns a device, and the calls that reach it from any other.

generate, prefill, cancel, drop ──► agenda ──► │ engine's thread │ ──► outbox ──► Generation, PrefillJob
loader threads: chunk read      ──►            │ settle, step    │
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import torch

from memkv.config import EngineConfig
from memkv.engine.device_thread import DeviceThread
from memkv.engine.generation import Generation
from memkv.engine.lane import Lane
from memkv.engine.limits import pool_bytes, require_blocks, require_context
from memkv.engine.model_runner import ModelRunner
from memkv.engine.prefill import Computed, PrefillJob
from memkv.engine.request import GenerateRequest, PrefillRequest
from memkv.engine.residency import ChunkRef, KVSource
from memkv.engine.scheduler import Task
from memkv.engine.sequence import Sequence
from memkv.engine.stats import EngineStats
from memkv.engine.timeline import Event
from memkv.errors import ConfigError
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout
from memkv.model.compilation import compile_layers
from memkv.model.loader import LoadedModel

_KV_DTYPES = ("float32", "bfloat16")  # what the kernels read
Outcome = TypeVar("Outcome")


class Engine:
    """Generates and prefills with one model. Every method may be called from any thread.

    Each block size has a lane of its own, made when it is first asked for, with a pool of
    `config.pool_bytes`: an engine that serves collections of two block sizes may hold twice that. On a CPU
    the system backs the pool with memory as blocks are first written.

    Args:
        model: loaded and verified.
        kv_dtype: "float32" or "bfloat16", of keys and values.
        config: sizes and limits.
        poison: for tests; what is not written reads as NaN.

    Raises:
        ConfigError: no kernel reads `kv_dtype`.
    """

    def __init__(
        self, model: LoadedModel, kv_dtype: str, config: EngineConfig, *, poison: bool = False
    ) -> None:
        if kv_dtype not in _KV_DTYPES:
            raise ConfigError(f"kv.dtype = {kv_dtype!r} is not served", hint=" or ".join(_KV_DTYPES))
        self._model = model
        self._kv_dtype = kv_dtype
        if config.compile and torch.device(model.device).type == "cuda":
            compile_layers(model)
        config = replace(config, pool_bytes=pool_bytes(config, [model.device]))
        self._config = config
        row_width = model.spec.num_heads * model.spec.head_dim
        self._thread = DeviceThread(ModelRunner(model), config, row_width, poison=poison)

    def layout(self, block_size: int) -> KVLayout:
        """The layout of this model's KV. Raises `LayoutError` for a block size that no kernel serves."""
        spec = self._model.spec
        return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, self._kv_dtype)

    def generate(self, request: GenerateRequest, source: KVSource) -> Generation:
        """Starts an answer and returns at once.

        Args:
            source: where the chunks' KV is read from, and written to where it had to be computed.

        Raises:
            BadRequestError: the request is not valid.
            ContextTooLong: it can never run: it exceeds the model's context or the whole pool.
            EngineClosed: the engine takes no requests any more.

        The generation itself may fail with `Overloaded`, `ReuseUnavailable`, what the source raises, or
        what the model's step raises.
        """
        asked = time.monotonic()
        request.validate(self._model.spec.vocab_size)
        layout = self.layout(request.block_size)
        generation = Generation()
        sequence = Sequence(
            request,
            source,
            generation,
            self._model.spec.eos_token_ids,
            asked,
            self._config.queue_seconds,
        )
        generation.on_cancel = partial(self.cancel, sequence)
        placement = sequence.placement
        require_context(self._model.spec, request.prompt_tokens, request.sampling.max_tokens)
        own_blocks = placement.num_private_blocks + placement.num_answer_blocks
        blocks = placement.num_mapped_blocks + own_blocks
        require_blocks(layout, blocks, self._thread.num_blocks(layout))
        self._thread.submit(sequence, layout)
        return generation

    def prefill(
        self,
        context: ChunkRef,
        chunks: Iterable[ChunkRef],
        source: KVSource,
        *,
        block_size: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[ChunkKV]:
        """Computes chunks behind their context, many in a pass, and returns them in the order asked for.

        Running generations take turns with it. What it computed stays resident while nothing else needs
        the room.

        Args:
            context: a ref without context; the prefix of the prompts, or what else comes first.
            source: of the context alone: read, and written to where it had to be computed.
            on_progress: called in this thread with the chunks done and the chunks asked for.

        Raises:
            BadRequestError, ContextTooLong, EngineClosed: as for `generate`.
            Overloaded: no blocks became free in time.
            ModelError: a key or value is not a finite number.
        """
        return self.collect(self.submit_prefill(context, chunks, source, block_size=block_size), on_progress)

    def submit_prefill(
        self, context: ChunkRef, chunks: Iterable[ChunkRef], source: KVSource, *, block_size: int
    ) -> PrefillJob:
        """Starts what `prefill` does, and returns at once; raises as it does for what cannot run."""
        request = PrefillRequest(context, tuple(chunks), block_size)
        request.validate(self._model.spec.vocab_size)
        layout = self.layout(block_size)
        for ref in request.chunks:
            require_context(self._model.spec, ref.stored_position + ref.num_tokens, 0)
            blocks = layout.blocks_for(context.num_tokens) + layout.blocks_for(ref.num_tokens)
            require_blocks(layout, blocks, self._thread.num_blocks(layout))
        job = PrefillJob(request, source, time.monotonic())
        if request.chunks:
            self._thread.submit(job, layout)
        return job

    def collect(
        self, job: PrefillJob, on_progress: Callable[[int, int], None] | None = None
    ) -> list[ChunkKV]:
        """Waits for a job of this engine; cancels it where it or `on_progress` fails."""
        total = len(job.request.chunks)
        found: dict[int, ChunkKV] = {}
        try:
            while len(found) < total:
                event = job.events.get()
                if not isinstance(event, Computed):
                    raise event
                found[event.index] = event.kv
                if on_progress is not None:
                    on_progress(len(found), total)
        finally:
            if len(found) < total:
                self.cancel(job)
        return [found[index] for index in range(total)]

    def cancel(self, task: Task) -> None:
        """Ends a request; its blocks are free within one step. Does nothing once it is finished."""
        self._thread.cancel(task)

    def prefetch(
        self, refs: Iterable[ChunkRef], source: KVSource, *, block_size: int, to_host: bool = False
    ) -> None:
        """Starts to read chunks that will be asked for, and returns at once.

        They go into blocks of the pool, or, with `to_host` and while requests wait for those, into host
        memory. What has no room, or no valid KV, is left out.
        """
        wanted = tuple(refs)
        use = partial(
            self._thread.with_lane,
            self.layout(block_size),
            lambda lane: lane.prefetch(wanted, source, to_host=to_host),
        )
        self._thread.post(use)

    def is_idle(self) -> bool:
        """Whether it has nothing to do, not even to read what was prefetched. Raises `EngineClosed`.

        Asked between two steps, behind all that was asked of it before.
        """
        lanes = self._thread.lanes
        return self._thread.run(lambda: all(lane.is_idle for lane in lanes.values()))

    @property
    def max_running(self) -> int:
        return self._config.max_running

    @property
    def budgets(self) -> tuple[int, int]:
        """Bytes of its pool, and of its host pool."""
        return self._config.pool_bytes, self._config.host_bytes

    @property
    def num_tasks(self) -> int:
        """Requests that are not finished."""
        return self._thread.num_tasks

    def tokens_here(self, refs: Iterable[ChunkRef], block_size: int) -> int:
        """Tokens of those chunks that are resident or on their way, as of some moment of the current step."""
        lane = self._thread.lanes.get(self.layout(block_size))
        if lane is None:
            return 0
        return sum(ref.num_tokens for ref in refs if lane.residency.knows(ref))

    def drop(self, input_keys: Iterable[str]) -> None:
        """Forgets resident chunks and what was computed behind them.

        Requests that come later read the chunks from their source again.
        """
        keys = tuple(input_keys)
        self._on_lanes(lambda lane: lane.drop(keys))

    def evict(self, input_keys: Iterable[str]) -> None:
        """Takes chunks off the device; they stay in host memory, where they are there too."""
        keys = tuple(input_keys)
        self._on_lanes(lambda lane: lane.residency.drop(keys))

    @contextmanager
    def timeline(self) -> Iterator[list[Event]]:
        """What an idle engine does meanwhile: the list is filled at the end, in order of beginning.

        Lanes that are made meanwhile are left out.
        """
        lanes: list[Lane] = []

        def start() -> None:
            lanes.extend(self._thread.lanes.values())
            for lane in lanes:
                lane.start_timeline()

        found: list[Event] = []
        self._thread.run(start)
        try:
            yield found
        finally:
            events = self._thread.run(lambda: [event for lane in lanes for event in lane.stop_timeline()])
            found.extend(sorted(events, key=lambda event: event.start))

    def stats(self) -> EngineStats:
        """Without waiting for a step."""
        return self._thread.stats()

    def run(self, work: Callable[[], Outcome]) -> Outcome:
        """Does something short in the engine's thread, where torch has its threads, and waits for it.

        Raises what `work` raises, and `EngineClosed`.
        """
        return self._thread.run(work)

    def check_integrity(self) -> None:
        """Asserts between two steps that every block is accounted for."""
        self._thread.check_integrity()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Takes no more requests, gives those it has time to finish, ends the rest with `EngineClosed`."""
        self._thread.close(drain_seconds)

    def _on_lanes(self, change: Callable[[Lane], None]) -> None:
        """Between two steps."""

        def change_all() -> None:
            for lane in self._thread.lanes.values():
                change(lane)

        self._thread.post(change_all)
