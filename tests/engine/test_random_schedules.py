"""Random schedules in a small pool: nothing is lost, nobody gets wrong tokens, and the books are right.

MEMKV_RANDOM_STEPS and MEMKV_RANDOM_SEEDS, numbers with commas between, ask for longer ones and others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Many
from random import Random
from typing import Any

import pytest
import torch
from engine_harness import FAKE_VOCAB, Letters, RandomPrompts, end_late, fake_next
from lane_driver import SIZE, Driver

from memkv.engine.prefill import Computed, PrefillJob
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import Exact, Head, Map, Select
from memkv.engine.reuse.order import Order
from memkv.engine.sampler import Sampling, sample
from memkv.engine.scheduler import Task
from memkv.engine.sequence import Sequence
from memkv.errors import MemKVError, Overloaded
from memkv.kv.chunk import ChunkKV

STEPS = int(os.environ.get("MEMKV_RANDOM_STEPS", "2500"))
SEEDS = [int(seed) for seed in os.environ.get("MEMKV_RANDOM_SEEDS", "11").split(",")]
NUM_BLOCKS = 40
ENDS = tuple(range(0, FAKE_VOCAB, 40))  # of text, for some
CALLED_OFF = "on purpose"


class Schedule:
    """A lane, who asks it for something, and what becomes of that."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.driver = Driver(
            num_blocks=NUM_BLOCKS,
            max_batch_tokens=64,
            max_running=8,
            continuation_share=0.5,
            host_bytes=10 * 16 * SIZE * 4,
        )
        self.chunks = [self.driver.prompts.chunk(self.random.randint(1, 60), f"c{i}") for i in range(12)]
        self.other_prefix = RandomPrompts(FAKE_VOCAB, prefix_tokens=30, seed=1).prefix
        self.refs = [self.driver.prompts.prefix, *self.chunks]
        self.driver.store(*self.refs)
        self.driver.store(self.other_prefix)
        self.refs.append(self.other_prefix)
        self.stored = dict(self.driver.source.kept)
        for ref in self.chunks[8:]:
            del self.driver.source.kept[ref.input_key]
        self.driver.source.on_read = self._read
        self.driver.runner.before = self._before
        self.tasks: list[Task] = []
        self.answered: list[Sequence] = []
        self.interrupted = self.finished = self.stopped = self.failed = self.computed = 0
        self.fails = ""  # "read" or "step": the next one does

    def turn(self) -> None:
        """One thing happens."""
        driver, random = self.driver, self.random
        action = random.random()
        if action < 0.08:
            if len(self.tasks) < 20:
                self.tasks.append(self._job() if random.random() < 0.15 else self._question())
        elif action < 0.095:
            if self.tasks:
                driver.lane.cancel(random.choice(self.tasks))
        elif action < 0.105:
            driver.lane.drop([random.choice(self.refs).input_key])
        elif action < 0.125:
            driver.lane.prefetch(random.sample(self.refs, 2), driver.source, to_host=random.random() < 0.5)
        elif action < 0.135:
            driver.lane.residency.drop([random.choice(self.refs).input_key])
        elif action < 0.145:
            driver.source.kept.pop(random.choice(self.refs).input_key, None)
        elif action < 0.155:
            driver.loader.hold = True
        elif action < 0.185:
            driver.loader.come_back(
                *random.sample([ref.input_key for ref in self.refs], random.choice([0, 3]))
            )
        elif action < 0.188:
            self.fails = random.choice(["read", "step"])
        elif action < 0.189:
            driver.now += 2 * driver.config.queue_seconds
        else:
            driver.step(random.choice(["", "", "fill", "generation"]))
        driver.outbox.take_finished()
        driver.outbox.send()
        driver.runner.batches.clear()
        assert driver.lane.residency.counts().total == NUM_BLOCKS
        for task in [task for task in self.tasks if task.is_finished]:
            self.tasks.remove(task)
            self._check(task)

    def end(self) -> None:
        driver = self.driver
        self.fails = ""
        driver.loader.come_back()
        driver.run()
        assert all(task.is_finished for task in self.tasks)
        for task in self.tasks:
            self._check(task)
        driver.assert_idle()
        assert driver.lane.is_idle
        self.check_kept()

    def check_kept(self) -> None:
        """What is in the pool, in host memory and in the source is what it was computed to be."""
        lane = self.driver.lane
        for chunk in lane.residency._chunks.values():
            if chunk.ready and not chunk.adopted:
                self._check_kv(chunk.ref, lane.kv_cache.export_chunk(chunk.blocks, chunk.ref.num_tokens))
        for held in lane.host_pool._chunks.values():
            data = lane.host_pool.storage[held.blocks].numpy().tobytes()
            assert data == bytes(self.stored[held.ref.input_key].data)
        for ref in self.refs:
            if ref.input_key in self.driver.source.kept:
                self._check_kv(ref, self.driver.source.kept[ref.input_key])

    def _check_kv(self, ref: ChunkRef, kv: ChunkKV) -> None:
        assert bytes(kv.data) == bytes(self.stored[ref.input_key].data)

    def _read(self, ref: ChunkRef) -> ChunkKV | None:
        if self.fails == "read":
            self.fails = ""
            raise MemKVError(CALLED_OFF)
        return self.driver.source.kept.get(ref.input_key)

    def _before(self, batch: Any) -> None:
        if self.fails == "step":
            self.fails = ""
            raise MemKVError(CALLED_OFF)

    def _job(self) -> PrefillJob:
        return self.driver.submit_job(*self.random.sample(self.chunks, 3))

    def _question(self) -> Sequence:
        random = self.random
        changes: dict[str, Any] = {"max_tokens": random.randint(1, 120)}
        chunks = random.sample(self.chunks, random.randint(0, 4))
        if not chunks:
            changes["prefix"] = self.other_prefix
        tail = self.driver.prompts.ids(random.randint(1, 30))
        if self.answered and random.random() < 0.5:  # a conversation goes on
            before = self.answered[-1]
            asked = before.asked.request
            known = (*asked.tail_ids, *before.generation.result(0).token_ids)
            if len(known) < 200:
                chunks, tail = list(asked.chunks), (*known, *tail)
                changes |= {"prefix": asked.prefix, "policy": Exact()}
        if random.random() < 0.2:
            changes |= {"temperature": 1.0, "seed": random.randrange(9)}
        if random.random() < 0.2:
            changes |= {"eos": ENDS}
        if random.random() < 0.2:
            changes |= {"stop": ("ab", "q"), "decoder": Letters}
        if random.random() < 0.3:
            changes |= {"keep_logits": random.randint(1, len(tail))}
        changes.setdefault("policy", random.choice([Exact(), Map(), Head(1), Select(0.3), Order()]))
        reuse = random.choice(["auto", "auto", "off"])
        return self.driver.submit(*chunks, tail=tail, reuse=reuse, **changes)

    def _check(self, task: Task) -> None:
        if isinstance(task, PrefillJob):
            while not task.events.empty():
                event = task.events.get()
                if isinstance(event, Computed):
                    self._check_kv(task.request.chunks[event.index], event.kv)
                    self.computed += 1
            return
        try:
            result = task.generation.result(0)
        except MemKVError as error:
            if CALLED_OFF not in str(error) and not isinstance(error, Overloaded):
                raise
            self.failed += 1
            return
        assert [event.token_id for event in task.generation] == result.token_ids
        prompt = task.request.prompt_ids[: result.usage.prompt_tokens].tolist()  # as it was laid out
        sampling = task.asked.request.sampling
        count = len(result.token_ids)
        assert result.token_ids == _answer(prompt, sampling, count)
        ends = count and (result.token_ids[-1] in task._eos_token_ids or _stops(result.token_ids, sampling))
        if result.finish_reason == "cancelled":
            assert not ends and count < sampling.max_tokens
        else:
            assert result.finish_reason == ("stop" if ends else "length")
            assert ends or count == sampling.max_tokens
            self.answered.append(task)
        assert not any(token in task._eos_token_ids for token in result.token_ids[:-1])
        assert not _stops(result.token_ids[:-1], sampling)
        usage = result.usage
        assert usage.completion_tokens == count
        if result.finish_reason != "cancelled" and not usage.healed_chunks:
            assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
        keep = task.asked.request.keep_logits
        if keep and count:
            first = usage.prompt_tokens - keep
            assert result.logit_positions == tuple(range(first, usage.prompt_tokens + count - 1))
            assert result.logits is not None
            best = result.logits.argmax(dim=1)[-count:].tolist()
            seen = [*prompt, *result.token_ids]
            assert best == [fake_next(seen[: len(prompt) + index]) for index in range(count)]
        self.interrupted += usage.interruptions
        self.finished += result.finish_reason == "length"
        self.stopped += result.finish_reason == "stop"


def _answer(prompt: Many[int], sampling: Sampling, count: int) -> list[int]:
    """The first tokens of the answer, drawn one by one."""
    random = Random(sampling.seed)
    ids = list(prompt)
    for _ in range(count):
        token = fake_next(ids)
        if sampling.temperature:
            logits = torch.zeros((1, FAKE_VOCAB))
            logits[0, token] = 10.0
            token = int(sample(logits, [sampling], [random.random]))
        ids.append(token)
    return ids[len(prompt) :]


def _stops(token_ids: Many[int], sampling: Sampling) -> bool:
    letters = Letters()
    text = "".join(map(letters.push, token_ids))
    return any(stop in text for stop in sampling.stop)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moves_late", [False, True], ids=["moves at once", "moves late"])
def test_random_steps_leave_the_books_right(
    seed: int, moves_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions, jobs, cancels, losses, failures, late reads; where they are late, copies and exports too.

    That every block has its owners, and free, cached, pinned and private ones are the whole pool, is checked
    at each step.
    """
    schedule = Schedule(seed)
    if moves_late:
        end_late(monkeypatch, Random(seed))
    for number in range(STEPS):
        schedule.turn()
        if number % 200 == 0:
            schedule.check_kept()
    schedule.end()
    share = STEPS / 10_000
    assert schedule.finished > 100 * share and schedule.interrupted > 20 * share
    assert schedule.stopped > 20 * share and schedule.computed > 20 * share and schedule.failed
