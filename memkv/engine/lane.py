"""One KV layout's share of the engine: its cache, its pool, its queues, and what a step does to them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from memkv.config import EngineConfig
from memkv.engine.arrivals import Arrivals
from memkv.engine.batch import Part
from memkv.engine.continuations import Continuations
from memkv.engine.host_pool import HostPool
from memkv.engine.kv_cache import KVCache
from memkv.engine.loader import Loader
from memkv.engine.model_runner import ModelRunner
from memkv.engine.prefill import ChunkFill, PrefillJob
from memkv.engine.residency import ChunkRef, KVSource, Residency, ResidentChunk
from memkv.engine.scheduler import Scheduler, Task
from memkv.engine.sequence import Sequence
from memkv.engine.stats import LaneStats
from memkv.engine.steps import Steps
from memkv.engine.timeline import Event
from memkv.engine.work import Agenda, Outbox, Work
from memkv.errors import MemKVError, Overloaded
from memkv.kv.block_pool import BlockPool
from memkv.kv.layout import KVLayout

# Seconds that one step of prefill may keep a generation waiting, and a generation still to come.
_SHARED_SECONDS = 0.15
_ALONE_SECONDS = 0.5


class Lane:
    """Runs the generations and jobs of one layout. Belongs to the engine's thread.

    Args:
        num_blocks: in its pool.
        agenda: takes what follows from a step, and from a read in a loader's thread.
        outbox: takes what consumers are to get.
        poison: as in `KVCache`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        runner: ModelRunner,
        config: EngineConfig,
        loader: Loader,
        agenda: Agenda,
        outbox: Outbox,
        *,
        poison: bool = False,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.kv_cache = KVCache(layout, num_blocks, runner.device, poison=poison)
        self.residency = Residency(self.kv_cache, BlockPool(num_blocks))
        max_kept = int(config.continuation_share * num_blocks)
        self.continuations = Continuations(self.residency, max_kept, layout.block_size)
        self.scheduler = Scheduler(self.residency, self.continuations, config)
        self.steps = Steps(
            runner, self.kv_cache, self.residency, agenda, accept=self._accept, choose=self._choose
        )
        self._config = config
        self._agenda = agenda
        self._outbox = outbox
        self.host_pool = HostPool(layout, config.host_bytes, pinned=runner.device.type == "cuda")
        self._arrivals = Arrivals(
            self.kv_cache,
            self.host_pool,
            self.residency,
            self.scheduler,
            loader,
            agenda,
            outbox,
            self.steps.counters,
            self.steps.timeline,
            fail=self.fail,
            finish=self._finish_job,
            read_seconds=config.queue_seconds,
        )

    # Between steps

    def submit(self, task: Task) -> None:
        if isinstance(task, Sequence) and self.scheduler.waiting:
            self._arrivals.prefetch(task.placement.refs, task.source, to_host=False)
        self.scheduler.add(task)

    def prefetch(self, refs: Iterable[ChunkRef], source: KVSource, *, to_host: bool = False) -> None:
        self._arrivals.prefetch(refs, source, to_host=to_host)

    def cancel(self, task: Task) -> None:
        self._leave(task)
        outcome = task.result("cancelled", time.monotonic()) if isinstance(task, Sequence) else None
        self._outbox.finish(task, outcome)

    def fail(self, task: Task, error: MemKVError) -> None:
        self.steps.counters.failed_tasks += 1
        self._leave(task)
        self._outbox.finish(task, error)

    def drop(self, input_keys: Iterable[str]) -> None:
        """Forgets chunks, and what was computed behind them: requests that come later find neither."""
        keys = set(input_keys)
        self.residency.drop(keys)
        self.continuations.drop(keys)
        self._arrivals.drop(keys)
        for sequence in self.scheduler.sequences:
            if not keys.isdisjoint(sequence.origin.keys):
                sequence.leaves_run = False

    def settle(self, now: float) -> None:
        """Expires, admits and promotes: everything that follows from blocks and time alone."""
        for task in self.scheduler.expired(now):
            counts = self.residency.counts()
            self.fail(
                task,
                Overloaded(
                    f"no room for this request within its time: {counts.free} blocks are free and "
                    f"{counts.cached} can be evicted of {counts.total}",
                    hint="retry later, or raise engine.pool_bytes or engine.queue_seconds",
                ),
            )
        self._arrivals.copies.end()
        self._arrivals.end_exports()
        self._arrivals.give_up_late_reads(now)
        for fill in self.scheduler.take_idle_fills():  # before others find what they hold
            fill.release()
        while (foremost := self.scheduler.foremost()) is not None and self._start(foremost, now):
            pass
        self.scheduler.promote(now)

    def next_deadline(self) -> float:
        """The time at which `settle` has something to do although nothing happened."""
        return min(self._arrivals.next_deadline(), self.scheduler.next_deadline())

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything, and nothing is on its way."""
        return not (self.scheduler.sequences or self.scheduler.jobs or self._arrivals.is_busy)

    @property
    def has_generations(self) -> bool:
        """Whether any has tokens to compute."""
        return any(sequence.has_tokens for sequence in self.scheduler.running)

    @property
    def is_moving(self) -> bool:
        """Whether chunks are on their way to the host, or from there to the device."""
        return self._arrivals.is_exporting or self._arrivals.copies.are_under_way

    def await_moves(self) -> None:
        """Waits for the first of each."""
        self._arrivals.copies.end(wait=True)
        self._arrivals.end_exports(wait=True)

    @property
    def has_fills(self) -> bool:
        return self.scheduler.has_fills

    def end(self) -> None:
        """When all tasks have ended: waits for what is on its way, and holds nothing any more."""
        for fill in self.scheduler.take_idle_fills():
            fill.release()
        self._arrivals.end_prefetches()
        while self.is_moving:
            self.await_moves()

    # Steps

    def generation_work(self) -> Work:
        """Prompts get all the tokens of a step, or a bounded time where others are in their answers."""
        most = self._config.max_batch_tokens
        if self.scheduler.has_answers:
            most = min(most, self.steps.prompt_pace.tokens_for(_SHARED_SECONDS))
        parts = self.scheduler.generation_parts(most)
        return Work(partial(self.steps.generate, parts), lambda: [part.owner for part in parts])

    def collect_work(self, *, is_last: bool) -> Work | None:
        """What is left to do of a step of generations when the host has done what else it had to.

        Args:
            is_last: as in `Steps.collect`.
        """
        return self.steps.collect(is_last=is_last)

    def fill_work(self, *, shared: bool) -> Work:
        """`shared`: a generation waits for this step to end."""
        budget = self.steps.pace.tokens_for(_SHARED_SECONDS if shared else _ALONE_SECONDS)
        parts = self.scheduler.fill_parts(min(budget, self._config.max_batch_tokens))
        return Work(
            partial(self._fill, parts), lambda: self._waiters_of_all(part.owner.chunk for part in parts)
        )

    @property
    def awaits_generation(self) -> bool:
        """Whether anybody waits for an answer, running or not."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.loading or scheduler.waiting)

    def start_timeline(self) -> None:
        """Nothing may be under way."""
        self.steps.timeline.start(self.kv_cache.device)

    def stop_timeline(self) -> list[Event]:
        return self.steps.timeline.stop()

    def stats(self) -> LaneStats:
        return LaneStats(
            block_size=self.layout.block_size,
            blocks=self.residency.counts(),
            host_blocks=self.host_pool.counts(),
            counters=replace(self.steps.counters),
            healed_chunks=self._arrivals.healed_chunks,
            waiting=len(self.scheduler.waiting),
            loading=len(self.scheduler.loading),
            running=len(self.scheduler.running),
            jobs=len(self.scheduler.jobs),
            kept_blocks=self.continuations.num_blocks,
            fill_tokens_per_second=self.steps.pace.tokens_per_second,
        )

    def check_integrity(self) -> None:
        """Asserts that every block has its owners, and that every table is sound."""
        self.continuations.check_integrity()
        self.host_pool.check_integrity()
        sequences = (*self.scheduler.loading, *self.scheduler.running)
        self.residency.check_integrity(block for each in sequences for block in each.private_blocks)
        for sequence in sequences:
            assert sequence.run is not None, "bug: an admitted sequence has no tokens"
            sequence.run.table.check_integrity()

    def _choose(self, sequence: Sequence) -> None:
        if sequence.look is not None:  # not interrupted meanwhile
            sequence.choose(self.residency, time.monotonic())

    def _accept(self, sequence: Sequence, token: int) -> None:
        now = time.monotonic()
        event, reason = sequence.accept(token, now)
        self._outbox.token(sequence.generation, event)
        if reason is not None:
            sequence.leave_run(self.continuations)
            self._leave(sequence)
            result = sequence.result(reason, now)
            self.steps.counters.count(result.timings)
            self._outbox.finish(sequence, result)
            return
        if sequence.run is not None and sequence.is_ahead:
            sequence.resolve()
            return
        while sequence.run is not None and sequence.needs_block and not self.residency.fits((), 1):
            self.scheduler.interrupt_last()
        if sequence.run is not None:  # not interrupted, now or before
            sequence.grow(self.residency)

    def _fill(self, parts: list[Part[ChunkFill]]) -> None:
        self._arrivals.complete(self.steps.fill(parts))

    def _start(self, task: Task, now: float) -> bool:
        """Gives a task its next blocks; False where it has to wait for them."""
        try:
            pin = self.scheduler.start(task, now)
            if pin is None:
                return False
            self._arrivals.expect(task, pin)
        except MemKVError as error:
            self.fail(task, error)
        return True

    def _waiters_of_all(self, chunks: Iterable[ResidentChunk]) -> list[Task]:
        found: dict[int, Task] = {}
        for chunk in chunks:
            found.update({id(task): task for task in self.scheduler.waiters(chunk)})
        return list(found.values())

    def _finish_job(self, job: PrefillJob) -> None:
        self._leave(job)
        self._outbox.finish(job, None)

    def _leave(self, task: Task) -> None:
        self.scheduler.remove(task)
        if isinstance(task, Sequence):
            self.host_pool.touch(ref.input_key for ref in task.placement.refs)
        task.release(self.residency)
