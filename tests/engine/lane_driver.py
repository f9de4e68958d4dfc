"""Drives one lane without threads: the engine's loop, one turn at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_harness import (
    FAKE_LAYOUT,
    FAKE_VOCAB,
    FakeRunner,
    MemorySource,
    RandomPrompts,
    config,
    fake_answer,
)

from memkv.engine.failure import typed_error
from memkv.engine.generation import Generation
from memkv.engine.lane import Lane
from memkv.engine.loader import ReadOutcome
from memkv.engine.prefill import Computed, PrefillJob
from memkv.engine.request import GenerateRequest, PrefillRequest
from memkv.engine.residency import ChunkRef, KVSource
from memkv.engine.reuse import Map
from memkv.engine.sampler import Sampling
from memkv.engine.sequence import Sequence
from memkv.engine.work import Agenda, Outbox, Work
from memkv.errors import MemKVError
from memkv.kv.chunk import ChunkKV

SIZE = FAKE_LAYOUT.block_size


class ReadsByHand:
    """A loader whose reads come back when the test says so; at once by default."""

    def __init__(self) -> None:
        self.hold = False
        self.pending: list[tuple[str, Callable[[], None]]] = []
        self.written: list[tuple[str, ChunkKV]] = []

    def read(self, ref: ChunkRef, source: KVSource, done: Callable[[ReadOutcome], None]) -> None:
        def work() -> None:
            try:
                outcome: ReadOutcome = source.read(ref)
            except MemKVError as error:
                outcome = error
            done(outcome)

        if self.hold:
            self.pending.append((ref.input_key, work))
        else:
            work()

    def run(self, work: Callable[[], None]) -> None:
        if self.hold:
            self.pending.append(("", work))
        else:
            work()

    def come_back(self, *keys: str) -> None:
        """Lets the pending reads of these chunks come back, or all of them; later ones do at once."""
        self.hold = bool(keys)
        pending, self.pending = self.pending, []
        for key, work in pending:
            if keys and key not in keys:
                self.pending.append((key, work))
            else:
                work()

    def write(self, ref: ChunkRef, source: KVSource, kv: ChunkKV) -> None:
        source.write(ref, kv)


class Driver:
    """What the engine's thread does with one lane, step by step."""

    def __init__(self, num_blocks: int = 64, **changes: Any) -> None:
        self.agenda, self.outbox = Agenda(), Outbox()
        self.runner, self.loader = FakeRunner(), ReadsByHand()
        self.config = config(**changes)
        self.lane = Lane(
            FAKE_LAYOUT,
            num_blocks,
            self.runner,  # type: ignore[arg-type]
            self.config,
            self.loader,  # type: ignore[arg-type]
            self.agenda,
            self.outbox,
            poison=True,
        )
        self.source = MemorySource()
        self.prompts = RandomPrompts(FAKE_VOCAB)
        self.now = 0.0
        self.jobs: dict[int, dict[int, ChunkKV] | MemKVError] = {}

    def store(self, *refs: ChunkRef) -> None:
        """Puts the prefix and chunks into the source, as an ingest would have."""
        other = Driver(256)
        job = other.submit_job(*refs, self.prompts.chunk(1), prefix=self.prompts.prefix)
        other.run()
        made = other.chunks_of(job)
        self.source.kept.update({ref.input_key: made[i] for i, ref in enumerate(refs)})
        self.source.kept.update(other.source.kept)

    def sequence(self, *chunks: ChunkRef, tail: int | tuple[int, ...] = 5, **changes: Any) -> Sequence:
        drawn = ("max_tokens", "temperature", "seed", "stop")
        sampling = {name: changes.pop(name) for name in drawn if name in changes}
        eos = changes.pop("eos", ())
        request = GenerateRequest(
            changes.pop("prefix", self.prompts.prefix),
            chunks,
            self.prompts.ids(tail) if isinstance(tail, int) else tail,
            SIZE,
            changes.pop("policy", Map()),
            sampling=Sampling(**{"max_tokens": 4, **sampling}),
            **changes,
        )
        return Sequence(request, self.source, Generation(), eos, self.now, self.config.queue_seconds)

    def submit(self, *chunks: ChunkRef, **changes: Any) -> Sequence:
        sequence = self.sequence(*chunks, **changes)
        self.lane.submit(sequence)
        return sequence

    def submit_job(self, *chunks: ChunkRef, prefix: ChunkRef | None = None) -> PrefillJob:
        request = PrefillRequest(prefix or self.prompts.prefix, chunks, SIZE)
        job = PrefillJob(request, self.source, self.now)
        self.lane.submit(job)
        return job

    def chunks_of(self, job: PrefillJob) -> dict[int, ChunkKV]:
        found = {}
        while not job.events.empty():
            event = job.events.get()
            assert isinstance(event, Computed), event
            found[event.index] = event.kv
        return found

    def do(self, work: Work) -> None:
        try:
            work.run()
        except (MemKVError, RuntimeError, MemoryError) as error:
            for task in list(work.scope()):
                if not task.is_finished:
                    self.lane.fail(task, typed_error(error))

    def settle(self) -> None:
        settled = False
        while not settled:  # no oftener than the engine's thread: once, but for what follows
            for work in self.agenda.take_posted():
                self.do(work)
            self.lane.settle(self.now)
            settled = not self.follow_up() and not self.agenda._posted  # reads that came back at once
        self.lane.check_integrity()
        self.outbox.take_finished()
        self.outbox.send()

    def collect(self, *, is_last: bool) -> bool:
        collect = self.lane.collect_work(is_last=is_last)
        if collect is not None:
            self.do(collect)
        return collect is not None

    def step(self, kind: str = "") -> bool:
        self.settle()
        if self.lane.has_generations and kind != "fill":
            self.do(self.lane.generation_work())
            self.collect(is_last=False)
        elif self.collect(is_last=True):
            pass
        elif self.lane.has_fills and kind != "generation":
            self.do(self.lane.fill_work(shared=False))
        elif self.lane.is_moving:
            self.lane.await_moves()
        else:
            return False
        self.follow_up()
        self.settle()
        return True

    def follow_up(self) -> bool:
        work = first = self.agenda.next_follow_up()
        while work is not None:
            self.do(work)
            work = self.agenda.next_follow_up()
        return first is not None

    def run(self) -> None:
        while self.step():
            pass

    def finish(self, sequence: Sequence) -> list[int]:
        """Runs to the end; the answer is what it has to be."""
        self.run()
        result = sequence.generation.result(0)
        prompt = sequence.request.prompt_ids[
            : result.usage.prompt_tokens
        ].tolist()  # behind it, what it resumed
        expected = fake_answer(prompt, sequence.request.sampling.max_tokens)
        assert result.token_ids == expected
        return result.token_ids

    def assert_idle(self) -> None:
        counts = self.lane.residency.counts()
        assert counts.pinned == counts.private == 0
        assert counts.free + counts.cached == self.lane.num_blocks
        self.lane.check_integrity()
