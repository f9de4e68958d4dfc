"""One lane by hand: who gets blocks next, who gives up, and what every way out gives back."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import (
    FAKE_LAYOUT,
)
from lane_driver import Driver

from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import Head
from memkv.errors import InternalServerError, KernelArgumentError, MemKVError, Overloaded

SIZE = FAKE_LAYOUT.block_size


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_blocks_are_given_in_order_and_nobody_passes() -> None:
    driver = Driver(num_blocks=8)
    driver.prompts.prefix = ChunkRef("prefix", (), ())
    first = driver.submit(tail=5 * SIZE, max_tokens=1)
    big = driver.submit(tail=6 * SIZE, max_tokens=1)
    small = driver.submit(tail=SIZE, max_tokens=1)
    driver.settle()
    assert list(driver.lane.scheduler.running) == [first]
    assert list(driver.lane.scheduler.waiting) == [big, small]
    driver.step()
    assert list(driver.lane.scheduler.running) == [big, small]
    for sequence in (first, big, small):
        driver.finish(sequence)
    driver.assert_idle()


def test_who_waits_past_the_deadline_is_told_so() -> None:
    driver = Driver(num_blocks=8, queue_seconds=5.0)
    driver.prompts.prefix = ChunkRef("prefix", (), ())
    first = driver.submit(tail=8 * SIZE, max_tokens=1)
    driver.settle()
    late = driver.submit(tail=SIZE)
    sooner = driver.submit(tail=SIZE, queue_seconds=1.0)
    assert driver.lane.next_deadline() == 1.0
    driver.now = 4.9
    driver.settle()
    assert (sooner.generation.finish_reason, late.generation.finish_reason) == ("error", None)
    driver.now = 5.0
    driver.settle()
    with pytest.raises(Overloaded, match="0 blocks are free and 0 can be evicted of 8"):
        late.generation.result(0)
    driver.finish(first)
    driver.assert_idle()


def test_only_so_many_run_at_once() -> None:
    driver = Driver(max_running=3)
    driver.store()
    sequences = [driver.submit() for _ in range(5)]
    driver.settle()
    assert len(driver.lane.scheduler.running) == 3
    for sequence in sequences:
        driver.finish(sequence)


def test_room_for_a_query_comes_from_idle_chunks() -> None:
    driver = Driver(num_blocks=12)
    chunks = [driver.prompts.chunk(3 * SIZE, f"c{i}") for i in range(3)]
    driver.store(*chunks)
    for chunk in chunks:
        driver.finish(driver.submit(chunk))
    assert driver.lane.residency.counts().cached == 1 + 9
    driver.finish(driver.submit(tail=5 * SIZE, max_tokens=1))
    assert driver.lane.residency.counts().cached <= 7
    driver.source.reads.clear()
    driver.finish(driver.submit(chunks[2]))
    assert driver.source.reads == []  # the one used last was kept
    driver.assert_idle()


@pytest.mark.parametrize("moment", ["waiting", "loading", "healing", "prompt", "answer", "finished"])
def test_cancel_gives_everything_back_at_once(moment: str) -> None:
    driver = Driver(num_blocks=16, max_batch_tokens=8)
    a = driver.prompts.chunk(40, "a")
    if moment not in ("healing",):
        driver.store(a)
    if moment == "waiting":
        blocker = driver.submit(tail=12 * SIZE, max_tokens=1)
        driver.settle()
    driver.loader.hold = moment == "loading"
    sequence = driver.submit(a, tail=20, max_tokens=30)
    driver.settle()
    if moment == "healing":
        driver.step("fill")
        assert driver.lane.scheduler.fills
    if moment in ("prompt", "answer"):
        driver.step()
    if moment == "answer":
        for _ in range(5):
            driver.step()
    if moment == "finished":
        driver.run()
    state = driver.lane.scheduler
    place = {"waiting": state.waiting, "loading": state.loading, "healing": state.loading}.get(
        moment, state.running
    )
    assert (sequence in place) == (moment != "finished")
    if moment != "finished":
        driver.lane.cancel(sequence)
        driver.settle()
        if moment != "waiting":
            driver.assert_idle()
        result = sequence.generation.result(0)
        assert result.finish_reason == "cancelled"
        assert len(result.token_ids) == (4 if moment == "answer" else 0)
    if moment == "waiting":
        driver.finish(blocker)
    driver.loader.come_back()  # for nobody
    driver.settle()
    driver.finish(driver.submit(a))
    driver.assert_idle()


def test_a_failed_step_fails_those_in_it_and_nobody_else(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    driver.store(a)
    doomed = [driver.submit(a), driver.submit(a)]
    driver.settle()
    waiting = driver.sequence(a)

    def fail(batch: object) -> None:
        raise RuntimeError("the device is on fire")

    driver.runner.before = fail
    driver.do(driver.lane.generation_work())
    driver.runner.before = None
    driver.settle()
    for sequence in doomed:
        with pytest.raises(MemKVError, match="on fire"):
            sequence.generation.result(0)
    driver.assert_idle()
    driver.lane.submit(waiting)
    driver.finish(waiting)


@pytest.mark.parametrize("kind", [RuntimeError, KernelArgumentError])
def test_each_of_those_in_a_failed_step_gets_an_error_of_its_own(
    driver: Driver, kind: type[Exception]
) -> None:
    """Each is raised in another thread: a shared one would gather their tracebacks."""

    def fail(batch: object) -> None:
        raise kind("no luck")

    driver.store()
    doomed = [driver.submit(), driver.submit()]
    driver.settle()
    driver.runner.before = fail
    driver.run()
    one, other = (sequence.generation._error for sequence in doomed)
    assert one is not None and other is not None and one is not other
    assert one.__cause__ is other.__cause__ and isinstance(one.__cause__, kind)
    assert type(one) is (kind if issubclass(kind, MemKVError) else InternalServerError)


class FailsOnce:
    """Runs out of memory at its n-th call."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.failed = False

    def __call__(self, *args: Any) -> None:
        self._left -= 1
        if self._left < 0 and not self.failed:
            self.failed = True
            raise MemoryError


@pytest.mark.parametrize("place", ["step", "import"])
def test_a_failure_at_any_point_leaves_the_books_balanced(place: str) -> None:
    """The n-th step, or the n-th copy into the cache, runs out of memory, for every n until none does."""
    for number in range(40):
        driver = Driver(max_batch_tokens=32)
        a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(21, "b")
        driver.store(a)
        fails = FailsOnce(number)
        copy = driver.lane.kv_cache.import_chunk
        if place == "step":
            driver.runner.before = fails
        else:
            hook = lambda kv, blocks, fails=fails, copy=copy: (fails(), copy(kv, blocks))[1]  # noqa: E731
            driver.lane.kv_cache.import_chunk = hook  # type: ignore[method-assign]
        tasks = [driver.submit(a, b), driver.submit(b, a, policy=Head(1)), driver.submit_job(b, a)]
        driver.run()
        assert all(task.is_finished for task in tasks)
        driver.assert_idle()
        driver.runner.before = None
        driver.lane.kv_cache.import_chunk = copy  # type: ignore[method-assign]
        driver.finish(driver.submit(a, b))
        driver.assert_idle()
        if not fails.failed:
            assert number >= 2
            return
    pytest.fail("it never stopped failing")


def test_running_out_of_memory_is_overload(driver: Driver) -> None:
    def fail(batch: object) -> None:
        raise MemoryError

    driver.runner.before = fail
    sequence = driver.submit()
    driver.run()
    with pytest.raises(Overloaded, match="memory ran out"):
        sequence.generation.result(0)
    driver.assert_idle()


def test_dropping_a_chunk_spares_who_runs_and_is_seen_by_who_comes_later(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    driver.store(a)
    running = driver.submit(a, max_tokens=6)
    driver.step()
    driver.lane.residency.drop(["a"])
    driver.lane.check_integrity()
    del driver.source.kept["a"]
    later = driver.submit(a)
    driver.finish(running)
    driver.finish(later)
    assert running.generation.result(0).usage.healed_chunks == 0
    assert later.generation.result(0).usage.healed_chunks == 1
    driver.assert_idle()
