"""Who gets blocks next, and whose tokens the next step computes.

    waiting ──blocks──► loading ──chunks in place──► running
    jobs    ──blocks──► fills                              (one chunk at a time)

Blocks are given strictly in the order of waiting, across generations and jobs: the one that has waited
longest goes first, and nobody passes it. A generation takes the blocks of its prompt at once, and those of
its answer one by one; where none is left, the one that was admitted last gives its own back, waits as the
foremost and computes them again later. One that could not finish alone was refused, and only the foremost job
takes blocks, so the oldest of those that hold some can always finish.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable

from memkv.config import EngineConfig
from memkv.engine.arrangement import arrangements
from memkv.engine.batch import Part
from memkv.engine.continuations import Continuations
from memkv.engine.prefill import ChunkFill, PrefillJob
from memkv.engine.residency import Pin, Residency, ResidentChunk
from memkv.engine.sequence import Sequence

Task = Sequence | PrefillJob


class Scheduler:
    """The queues of one lane. Belongs to the engine's thread."""

    def __init__(self, residency: Residency, continuations: Continuations, config: EngineConfig) -> None:
        self._residency = residency
        self._continuations = continuations
        self._config = config
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.loading: dict[Sequence, None] = {}
        self.running: dict[Sequence, None] = {}
        self.jobs: deque[PrefillJob] = deque()
        self.fills: list[ChunkFill] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap; some wait no longer
        self._numbers = itertools.count()
        self._blocked: tuple[Task, int] | None = None  # who did not fit, and after how many changes

    def add(self, task: Task) -> None:
        if isinstance(task, Sequence):
            self.waiting[task] = None
            heapq.heappush(self._deadlines, (task.deadline, next(self._numbers), task))
        else:
            self.jobs.append(task)

    def remove(self, task: Task) -> None:
        """Takes a task out of whatever queue it is in."""
        if self._blocked is not None and self._blocked[0] is task:
            self._blocked = None
        if isinstance(task, PrefillJob):
            if task in self.jobs:  # or it was not admitted yet
                self.jobs.remove(task)
            return
        for place in (self.waiting, self.loading, self.running):
            place.pop(task, None)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return (*self.waiting, *self.loading, *self.running)

    def waiters(self, chunk: ResidentChunk) -> list[Task]:
        """Everyone who cannot go on before a chunk is ready, be it only because a fill stands behind it."""
        awaited = {chunk, *(fill.chunk for fill in self.fills if fill.stands_behind(chunk))}
        everyone: Iterable[Task] = (*self.loading, *self.jobs)
        return [task for task in everyone if any(not awaited.isdisjoint(pin.chunks) for pin in task.pins)]

    def foremost(self) -> Task | None:
        """Who is to get blocks next."""
        head = next(iter(self.waiting), None) if self._num_admitted < self._config.max_running else None
        job = next((job for job in self.jobs if not job.all_started), None)
        if job is not None and sum(each.active_tokens for each in self.jobs) >= self._config.max_batch_tokens:
            job = None  # enough chunks are under way to fill a step
        if head is None or job is None:
            return head or job
        return head if head.since <= job.since else job

    def start(self, task: Task, now: float) -> Pin | None:
        """Gives a task the blocks it needs next; None where there are too few.

        Raises:
            InternalServerError: a chunk's key stands for other tokens than the resident chunk's.
        """
        if self._blocked == (task, self._residency.num_changes):
            return None
        pin = self._start(task, now)
        self._blocked = (task, self._residency.num_changes) if pin is None else None
        return pin

    def _start(self, task: Task, now: float) -> Pin | None:
        if isinstance(task, PrefillJob):
            wanted = task.wanted()
            if not self._residency.fits(wanted):
                task.blocked_since = now if task.blocked_since is None else task.blocked_since
                return None
            pin = self._residency.pin(wanted)
            task.start_next(pin, now)
            return pin
        spare = len(self.running)  # for their answers: who begins must not interrupt, or soon be interrupted
        for arrangement in arrangements(task.wanted(), self._continuations):
            placement = arrangement.placement
            if self._residency.fits(placement.refs, placement.num_private_blocks + spare):
                pin = task.start(arrangement, self._residency, now)
                task.turn = next(self._numbers)
                self._continuations.touch(ref.input_key for ref in placement.refs)
                del self.waiting[task]
                self.loading[task] = None
                return pin
        return None

    def interrupt_last(self) -> Sequence:
        """Takes the blocks of the generation that got its own last; it waits as the foremost."""
        last = max((*self.loading, *self.running), key=lambda each: each.turn)
        self.remove(last)
        last.interrupt(self._residency)
        self.waiting[last] = None
        self.waiting.move_to_end(last, last=False)
        return last

    def promote(self, now: float) -> None:
        """Lets those run whose chunks are all in place."""
        for sequence in [each for each in self.loading if all(pin.is_ready for pin in each.pins)]:
            sequence.begin(now)
            del self.loading[sequence]
            self.running[sequence] = None

    def expired(self, now: float) -> list[Task]:
        """Those who have waited for blocks for too long."""
        tasks: list[Task] = []
        while self._first_deadline() <= now:
            tasks.append(heapq.heappop(self._deadlines)[2])
        tasks.extend(job for job in self.jobs if now >= self._job_deadline(job))
        return tasks

    def next_deadline(self) -> float:
        """When `expired` may have something new to say."""
        return min([self._first_deadline(), *map(self._job_deadline, self.jobs)])

    def take_idle_fills(self) -> list[ChunkFill]:
        """Removes the fills that nobody waits for any more."""
        idle = [fill for fill in self.fills if fill.is_idle]
        self.fills = [fill for fill in self.fills if not fill.is_idle]
        return idle

    @property
    def has_fills(self) -> bool:
        return any(fill.can_run for fill in self.fills)

    @property
    def has_answers(self) -> bool:
        """Whether any sequence is in the middle of its answer."""
        return any(each.is_answering for each in self.running)

    def generation_parts(self, prompt_budget: int) -> list[Part[Sequence]]:
        """One token of every sequence in the middle of its answer, then prompts in order of admission.

        A prompt gets what the answers leave, so that there are never more answers than tokens in a step.

        Args:
            prompt_budget: tokens of prompts, at most.
        """
        budget = self._config.max_batch_tokens
        running = [each for each in self.running if each.has_tokens]
        answering = [each for each in running if each.is_answering]
        prompts = [each for each in running if not each.is_answering]
        parts = [each.part(1) for each in answering[:budget]]
        budget = min(budget - len(parts), prompt_budget)
        for sequence in prompts:
            assert sequence.run is not None
            count = min(budget, sequence.run.remaining)
            if count == 0:
                break
            parts.append(sequence.part(count))
            budget -= count
        return parts

    def fill_parts(self, budget: int) -> list[Part[ChunkFill]]:
        """Tokens of chunks, those that a query waits for first, otherwise in order."""
        parts: list[Part[ChunkFill]] = []
        awaited = {chunk for each in self.loading for pin in each.pins for chunk in pin.chunks}
        for fill in sorted(self.fills, key=lambda fill: fill.chunk not in awaited):
            count = min(budget, fill.run.remaining)
            if count and fill.can_run:
                parts.append(Part(fill, fill.run, count))
                budget -= count
        return parts

    @property
    def _num_admitted(self) -> int:
        return len(self.loading) + len(self.running)

    def _first_deadline(self) -> float:
        """Of those who wait."""
        while self._deadlines and not self._is_current(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def _is_current(self, deadline: float, number: int, sequence: Sequence) -> bool:
        return sequence in self.waiting and sequence.deadline == deadline

    def _job_deadline(self, job: PrefillJob) -> float:
        if job.blocked_since is None:
            return float("inf")
        return job.blocked_since + self._config.queue_seconds
