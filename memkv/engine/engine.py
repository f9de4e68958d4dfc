"""The engine: one thread that owns a device, and the calls that reach it from any other.

generate, prefill, cancel, drop ──► agenda ──► │ engine's thread │ ──► outbox ──► Generation, PrefillJob
loader threads: chunk read      ──►            │ settle, step    │

loop    prepare  ─►  submit one step of one lane  ─►  prepare  ─►  collect its tokens  ─►  send
prepare    do what was posted, settle every lane (expire, admit, promote): while the device computes
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import torch

from memkv.config import EngineConfig
from memkv.engine.failure import typed_error
from memkv.engine.fair_share import FairShare
from memkv.engine.generation import Generation
from memkv.engine.lane import Lane
from memkv.engine.limits import require_blocks, require_context
from memkv.engine.loader import Loader
from memkv.engine.model_runner import ModelRunner
from memkv.engine.prefill import Computed, PrefillJob
from memkv.engine.request import GenerateRequest, PrefillRequest
from memkv.engine.residency import ChunkRef, KVSource
from memkv.engine.scheduler import Task
from memkv.engine.sequence import Sequence
from memkv.engine.stats import EngineStats
from memkv.engine.threads import Threads, use_threads
from memkv.engine.work import Agenda, Outbox, Work
from memkv.errors import ConfigError, EngineClosed, MemKVError
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout
from memkv.model.loader import LoadedModel

_log = logging.getLogger(__name__)
_KV_DTYPES = ("float32", "bfloat16")  # what the kernels read
_LOOK_AGAIN_SECONDS = 0.5  # whether the thread that was asked still lives
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
        self._config = config
        self._poison = poison
        self._runner = ModelRunner(model)
        self._agenda = Agenda()
        self._outbox = Outbox()
        self._loader = Loader()
        self._lanes: dict[KVLayout, Lane] = {}
        self._turns: FairShare[tuple[KVLayout, str]] = FairShare()
        self._threads = Threads(0, 0)
        self._changed = threading.Condition()  # guards what follows
        self._tasks: dict[Task, KVLayout] = {}  # everything submitted and not finished
        self._closing = False
        self._death: BaseException | None = None
        self._stats = EngineStats(alive=True, threads=self._threads, lanes=())
        self._thread = threading.Thread(target=self._run, name="memkv-engine", daemon=True)
        self._thread.start()

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
        request.validate(self._model.spec.vocab_size)
        layout = self.layout(request.block_size)
        generation = Generation()
        sequence = Sequence(
            request,
            source,
            generation,
            self._model.spec.eos_token_ids,
            time.monotonic(),
            self._config.queue_seconds,
        )
        generation.on_cancel = partial(self.cancel, sequence)
        placement = sequence.placement
        require_context(self._model.spec, request.prompt_tokens, request.sampling.max_tokens)
        own_blocks = placement.num_private_blocks + placement.num_answer_blocks
        blocks = placement.num_mapped_blocks + own_blocks
        require_blocks(layout, blocks, self._num_blocks(layout))
        self._submit(sequence, layout)
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
            require_blocks(layout, blocks, self._num_blocks(layout))
        job = PrefillJob(request, source, time.monotonic())
        if request.chunks:
            self._submit(job, layout)
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
        with suppress(EngineClosed):  # it has ended already
            self._agenda.post(Work(partial(self._cancel_now, task), lambda: (task,)))

    def prefetch(self, refs: Iterable[ChunkRef], source: KVSource, *, block_size: int) -> None:
        """Starts to read chunks that will be asked for, and returns at once.

        They go into blocks of the pool, or, while requests wait for those, into host memory. What has no
        room, or no valid KV, is left out.
        """
        layout = self.layout(block_size)
        with suppress(EngineClosed):
            work = partial(self._prefetch, layout, tuple(refs), source)
            self._agenda.post(Work(work, lambda: ()))

    @property
    def max_running(self) -> int:
        return self._config.max_running

    @property
    def num_tasks(self) -> int:
        """Requests that are not finished."""
        return len(self._tasks)

    def tokens_here(self, refs: Iterable[ChunkRef], block_size: int) -> int:
        """Tokens of those chunks that are resident or on their way, as of some moment of the current step."""
        lane = self._lanes.get(self.layout(block_size))
        if lane is None:
            return 0
        return sum(ref.num_tokens for ref in refs if lane.residency.knows(ref))

    def drop(self, input_keys: Iterable[str]) -> None:
        """Forgets resident chunks and what was computed behind them.

        Requests that come later read the chunks from their source again.
        """
        with suppress(EngineClosed):  # nothing is resident any more
            self._agenda.post(Work(partial(self._drop, tuple(input_keys)), lambda: ()))

    def evict(self, input_keys: Iterable[str]) -> None:
        """Takes chunks off the device; they stay in host memory, where they are there too."""
        with suppress(EngineClosed):
            self._agenda.post(Work(partial(self._evict, tuple(input_keys)), lambda: ()))

    def stats(self) -> EngineStats:
        """Without waiting for a step."""
        return replace(self._stats, alive=self._thread.is_alive() and not self._closing)

    def run(self, work: Callable[[], Outcome]) -> Outcome:
        """Does something short in the engine's thread, where torch has its threads, and waits for it.

        Raises what `work` raises, and `EngineClosed`.
        """
        done: Future[Outcome] = Future()

        def settle() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001  # it is the caller's
                done.set_exception(error)

        self._agenda.post(Work(settle, lambda: ()))
        while not wait((done,), timeout=_LOOK_AGAIN_SECONDS).done:
            if not self._thread.is_alive() and not done.done():
                raise self._closed_error()
        return done.result()

    def check_integrity(self) -> None:
        """Asserts between two steps that every block is accounted for."""

        def check() -> None:
            for lane in self._lanes.values():
                lane.check_integrity()

        try:
            self.run(check)
        except EngineClosed:
            self._thread.join()
            check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Takes no more requests, gives those it has time to finish, ends the rest with `EngineClosed`."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._tasks or not self._thread.is_alive(), drain_seconds)
        self._agenda.close()
        self._thread.join()
        self._loader.close()

    # In the caller's thread

    def _submit(self, task: Task, layout: KVLayout) -> None:
        with self._changed:
            if self._closing or self._death is not None:
                raise self._closed_error()
            self._tasks[task] = layout
            try:
                self._agenda.post(Work(partial(self._admit, task, layout), lambda: (task,)))
            except EngineClosed:
                del self._tasks[task]
                raise self._closed_error() from None

    def _num_blocks(self, layout: KVLayout) -> int:
        return self._config.pool_bytes // layout.bytes_per_block

    def _closed_error(self) -> EngineClosed:
        if self._death is None:
            return EngineClosed("the engine is closed")
        error = EngineClosed(
            f"the engine's thread died: {type(self._death).__name__}: {self._death}",
            hint="restart the server",
        )
        error.__cause__ = self._death
        return error

    # In the engine's thread

    def _run(self) -> None:
        try:
            spec = self._model.spec
            if self._runner.device.type == "cuda":
                torch.cuda.set_device(self._runner.device)
            self._threads = use_threads(self._config.threads, spec.num_heads * spec.head_dim)
            while not self._agenda.is_closed:
                self._loop_once()
        except BaseException as error:  # noqa: BLE001  # the thread's top: everyone is told why
            _log.critical("the engine's thread died", exc_info=True)
            self._death = error
        finally:
            self._end()

    def _loop_once(self) -> None:
        self._prepare()
        stepped = self._step()
        self._send()
        if not stepped:
            deadline = min((lane.next_deadline() for lane in self._lanes.values()), default=float("inf"))
            self._agenda.wait(max(0.0, deadline - time.monotonic()))

    def _prepare(self) -> None:
        while (work := self._agenda.next_posted()) is not None:
            self._do(work)
        now = time.monotonic()
        for lane in self._lanes.values():
            lane.settle(now)

    def _step(self) -> bool:
        """One step of the lane and kind whose turn it is; False where there is nothing to compute."""
        ready = [(layout, "generation") for layout, lane in self._lanes.items() if lane.has_generations]
        shared = any(lane.awaits_generation for lane in self._lanes.values())
        ready += [(layout, "fill") for layout, lane in self._lanes.items() if lane.has_fills]
        if not ready:
            return False
        turn = self._turns.choose(ready)
        lane = self._lanes[turn[0]]
        started = time.monotonic()
        self._do(lane.generation_work() if turn[1] == "generation" else lane.fill_work(shared=shared))
        if (collect := lane.collect_work()) is not None:
            self._prepare()
            self._do(collect)
        while (work := self._agenda.next_follow_up()) is not None:
            self._do(work)
        self._turns.charge(turn, time.monotonic() - started)
        return True

    def _do(self, work: Work) -> None:
        """The top of everything that a request can make fail."""
        try:
            work.run()
        except Exception as error:  # noqa: BLE001  # one request's failure must not be another's
            if not isinstance(error, MemKVError):
                _log.exception("a step failed")
            for task in work.scope():
                self._fail(task, typed_error(error))

    def _admit(self, task: Task, layout: KVLayout) -> None:
        self._lane(layout).submit(task)

    def _prefetch(self, layout: KVLayout, refs: tuple[ChunkRef, ...], source: KVSource) -> None:
        self._lane(layout).prefetch(refs, source)

    def _lane(self, layout: KVLayout) -> Lane:
        if layout not in self._lanes:
            self._lanes[layout] = Lane(
                layout,
                self._num_blocks(layout),
                self._runner,
                self._config,
                self._loader,
                self._agenda,
                self._outbox,
                poison=self._poison,
            )
        return self._lanes[layout]

    def _cancel_now(self, task: Task) -> None:
        lane = self._lane_of(task)
        if lane is not None and not task.is_finished:
            lane.cancel(task)

    def _fail(self, task: Task, error: MemKVError) -> None:
        if task.is_finished:
            return
        lane = self._lane_of(task)
        if lane is None:  # it could not be made
            self._outbox.finish(task, error)
        else:
            lane.fail(task, error)

    def _lane_of(self, task: Task) -> Lane | None:
        layout = self._tasks.get(task)
        return None if layout is None else self._lanes.get(layout)

    def _evict(self, input_keys: tuple[str, ...]) -> None:
        for lane in self._lanes.values():
            lane.residency.drop(input_keys)

    def _drop(self, input_keys: tuple[str, ...]) -> None:
        for lane in self._lanes.values():
            lane.drop(input_keys)

    def _send(self) -> None:
        """Publishes the state of things, then tells the consumers: what they see next is not older."""
        finished = self._outbox.take_finished()
        self._publish()
        if finished:
            with self._changed:
                for task in finished:
                    self._tasks.pop(task, None)
                self._changed.notify_all()
        self._outbox.send()

    def _publish(self) -> None:
        self._stats = EngineStats(
            alive=True,
            threads=self._threads,
            lanes=tuple(lane.stats() for lane in self._lanes.values()),
        )

    def _end(self) -> None:
        """Nobody is left waiting: whatever is not finished ends with `EngineClosed`."""
        self._agenda.close()
        with self._changed:
            self._closing = True
            tasks = list(self._tasks)
        for task in tasks:
            try:
                self._fail(task, self._closed_error())
            except Exception:  # noqa: BLE001  # its books are broken; the consumer is told all the same
                _log.exception("blocks of a request could not be given back")
                self._outbox.finish(task, self._closed_error())
        self._send()
