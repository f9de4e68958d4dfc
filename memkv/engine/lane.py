"""One KV layout's share of the engine: its cache, its pool, its queues, and what a step does to them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from memkv.config import EngineConfig
from memkv.engine.arrivals import Arrivals
from memkv.engine.batch import Batch, Part
from memkv.engine.continuations import Continuations
from memkv.engine.kv_cache import KVCache
from memkv.engine.loader import Loader
from memkv.engine.model_runner import ModelRunner
from memkv.engine.pace import Pace
from memkv.engine.prefill import ChunkFill, PrefillJob
from memkv.engine.residency import BlockCounts, Residency, ResidentChunk
from memkv.engine.sampler import sample
from memkv.engine.scheduler import Scheduler, Task
from memkv.engine.sequence import Sequence
from memkv.engine.work import Agenda, Outbox, Work
from memkv.errors import MemKVError, ModelError, Overloaded
from memkv.kv.block_pool import BlockPool
from memkv.kv.layout import KVLayout

# Seconds that one step of prefill may keep a generation waiting, and a generation still to come.
_SHARED_SECONDS = 0.15
_ALONE_SECONDS = 0.5
# Of prompts, in a step that answers share. On a CPU thread prompts of SmolLM2 took 12 % longer in parts of 64
# tokens (163 ms) than in one, and 64 % longer in parts of 32 (119 ms): every part reads all the weights.
_LEAST_PROMPT_TOKENS = 64


@dataclass(slots=True)
class LaneCounters:
    """What a lane has done so far."""

    steps: int = 0  # passes through the model for generations
    fill_steps: int = 0  # and for chunks
    generated_tokens: int = 0
    looked_tokens: int = 0  # tokens of looking passes
    prefilled_tokens: int = 0  # prompt tokens of generations
    filled_tokens: int = 0  # tokens of chunks, healed ones included
    failed_tasks: int = 0


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane as of the end of the last step."""

    block_size: int
    blocks: BlockCounts
    counters: LaneCounters
    healed_chunks: int  # chunks that had no valid KV when a query needed them
    waiting: int
    loading: int
    running: int
    jobs: int
    kept_blocks: int  # of runs that ended generations left behind, in use or not
    fill_tokens_per_second: float  # 0 before the first


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
        self.counters = LaneCounters()
        self.kv_cache = KVCache(layout, num_blocks, runner.device, poison=poison)
        self.residency = Residency(self.kv_cache, BlockPool(num_blocks))
        max_kept = int(config.continuation_share * num_blocks)
        self.continuations = Continuations(self.residency, max_kept, layout.block_size)
        self.scheduler = Scheduler(self.residency, self.continuations, config)
        self.pace = Pace()  # of chunks
        self.prompt_pace = Pace(_LEAST_PROMPT_TOKENS)
        self._config = config
        self._runner = runner
        self._agenda = agenda
        self._outbox = outbox
        self._arrivals = Arrivals(
            self.kv_cache,
            self.residency,
            self.scheduler,
            loader,
            agenda,
            outbox,
            fail=self.fail,
            finish=self._finish_job,
            read_seconds=config.queue_seconds,
        )

    # Between steps

    def submit(self, task: Task) -> None:
        self.scheduler.add(task)

    def cancel(self, task: Task) -> None:
        self._leave(task)
        outcome = task.result("cancelled", time.monotonic()) if isinstance(task, Sequence) else None
        self._outbox.finish(task, outcome)

    def fail(self, task: Task, error: MemKVError) -> None:
        self.counters.failed_tasks += 1
        self._leave(task)
        self._outbox.finish(task, error)

    def drop(self, input_keys: Iterable[str]) -> None:
        """Forgets chunks, and what was computed behind them: requests that come later find neither."""
        keys = set(input_keys)
        self.residency.drop(keys)
        self.continuations.drop(keys)
        for sequence in self.scheduler.sequences:
            if not keys.isdisjoint(sequence.origin.keys):
                sequence.leaves_run = False

    def settle(self, now: float) -> None:
        """Expires, admits and promotes: everything that follows from blocks and time alone."""
        for fill in self.scheduler.take_idle_fills():
            fill.release()
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
        self._arrivals.give_up_late_reads(now)
        while (foremost := self.scheduler.foremost()) is not None and self._start(foremost, now):
            pass
        self.scheduler.promote(now)

    def next_deadline(self) -> float:
        """The time at which `settle` has something to do although nothing happened."""
        return min(self._arrivals.next_deadline(), self.scheduler.next_deadline())

    @property
    def has_generations(self) -> bool:
        return bool(self.scheduler.running)

    @property
    def has_fills(self) -> bool:
        return self.scheduler.has_fills

    # Steps

    def generation_work(self) -> Work:
        """Prompts get all the tokens of a step, or a bounded time where others are in their answers."""
        most = self._config.max_batch_tokens
        if self.scheduler.has_answers:
            most = min(most, self.prompt_pace.tokens_for(_SHARED_SECONDS))
        parts = self.scheduler.generation_parts(most)
        return Work(partial(self._generate, parts), lambda: [part.owner for part in parts])

    def fill_work(self, *, shared: bool) -> Work:
        """`shared`: a generation waits for this step to end."""
        budget = self.pace.tokens_for(_SHARED_SECONDS if shared else _ALONE_SECONDS)
        parts = self.scheduler.fill_parts(min(budget, self._config.max_batch_tokens))
        return Work(
            partial(self._fill, parts), lambda: self._waiters_of_all(part.owner.chunk for part in parts)
        )

    @property
    def awaits_generation(self) -> bool:
        """Whether anybody waits for an answer, running or not."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.loading or scheduler.waiting)

    def stats(self) -> LaneStats:
        return LaneStats(
            block_size=self.layout.block_size,
            blocks=self.residency.counts(),
            counters=replace(self.counters),
            healed_chunks=self._arrivals.healed_chunks,
            waiting=len(self.scheduler.waiting),
            loading=len(self.scheduler.loading),
            running=len(self.scheduler.running),
            jobs=len(self.scheduler.jobs),
            kept_blocks=self.continuations.num_blocks,
            fill_tokens_per_second=self.pace.tokens_per_second,
        )

    def check_integrity(self) -> None:
        """Asserts that every block has its owners, and that every table is sound."""
        self.continuations.check_integrity()
        sequences = (*self.scheduler.loading, *self.scheduler.running)
        self.residency.check_integrity(block for each in sequences for block in each.private_blocks)
        for sequence in sequences:
            assert sequence.run is not None, "bug: an admitted sequence has no tokens"
            sequence.run.table.check_integrity()

    def _generate(self, parts: list[Part[Sequence]]) -> None:
        batch = Batch.build(parts)
        started = time.monotonic()
        num_prompt = sum(part.count for part in parts if not part.owner.num_generated)
        result = self._runner.run(batch, self.kv_cache)
        logits, masses = result.logits, iter(result.masses)
        assert logits is not None or not batch.logit_rows
        self.counters.steps += 1
        row = 0
        done: list[tuple[Sequence, Tensor]] = []
        for part in parts:
            positions = part.positions
            completes = part.completes
            part.run.done += part.count
            if part.owner.look is not None:
                self._look(part, masses, completes)
                continue
            self.counters.prefilled_tokens += 0 if part.owner.num_generated else part.count
            if part.num_logits:
                assert logits is not None
                own = logits[row : row + part.num_logits]
                part.owner.keep(own, positions[-part.num_logits :])
                row += part.num_logits
                if completes:
                    done.append((part.owner, own[-1:]))
        if done:
            self._sample(done)
        if num_prompt >= _LEAST_PROMPT_TOKENS:
            self.prompt_pace.observe(num_prompt, time.monotonic() - started)

    def _look(self, part: Part[Sequence], masses: Iterator[Tensor], completes: bool) -> None:
        """Some or all of a looking pass was made."""
        sequence = part.owner
        self.counters.looked_tokens += part.count
        if part.look_rows:
            assert sequence.look is not None
            sequence.look.add(next(masses))
        if completes:
            choose = partial(self._choose, sequence)
            self._agenda.follow(Work(choose, partial(_only, sequence)))

    def _choose(self, sequence: Sequence) -> None:
        sequence.choose(self.residency, time.monotonic())

    def _sample(self, done: list[tuple[Sequence, Tensor]]) -> None:
        sequences = [sequence for sequence, _ in done]
        tokens = sample(
            torch.cat([row for _, row in done]),
            [sequence.request.sampling for sequence in sequences],
            [sequence.random for sequence in sequences],
        )
        for sequence, token in zip(sequences, tokens, strict=True):
            self._agenda.follow(Work(partial(self._accept, sequence, token), partial(_only, sequence)))

    def _accept(self, sequence: Sequence, token: int | None) -> None:
        if token is None:
            raise ModelError(
                "the model's logits are not finite numbers", hint="load the weights in a wider dtype"
            )
        self.counters.generated_tokens += 1
        now = time.monotonic()
        event, reason = sequence.accept(token, now)
        self._outbox.token(sequence.generation, event)
        if reason is not None:
            sequence.leave_run(self.continuations)
            self._leave(sequence)
            self._outbox.finish(sequence, sequence.result(reason, now))

    def _fill(self, parts: list[Part[ChunkFill]]) -> None:
        batch = Batch.build(parts)
        started = time.monotonic()
        self._runner.run(batch, self.kv_cache)
        self.pace.observe(batch.num_tokens, time.monotonic() - started)
        self.counters.fill_steps += 1
        self.counters.filled_tokens += batch.num_tokens
        for part in parts:
            completes = part.completes
            part.run.done += part.count
            if completes:
                fill = part.owner
                self._agenda.follow(
                    Work(partial(self._arrivals.complete, fill), partial(self.scheduler.waiters, fill.chunk))
                )

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
        task.release(self.residency)


def _only(task: Task) -> tuple[Task]:
    return (task,)
