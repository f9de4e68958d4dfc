"""One lane by hand: chunks that are missing, unreadable, dropped or late."""

from __future__ import annotations

import pytest
from engine_harness import (
    FAKE_LAYOUT,
    MemorySource,
)
from lane_driver import Driver

from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import Exact
from memkv.engine.stopwatch import Stopwatch
from memkv.errors import MemKVError, Overloaded, ReuseUnavailable
from memkv.kv.chunk import ChunkKV

SIZE = FAKE_LAYOUT.block_size


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_what_is_missing_is_prefilled_written_back_and_mapped(driver: Driver) -> None:
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(21, "b")
    driver.store(a)
    del driver.source.kept["prefix"]
    sequence = driver.submit(a, b, tail=7)
    driver.finish(sequence)
    usage = sequence.generation.result(0).usage
    assert (usage.healed_chunks, usage.fallback_reason) == (2, "chunk_kv_missing")
    assert usage.prefilled_tokens == 13 + 21 + 7
    assert usage.cached_tokens == 40
    assert driver.source.writes == ["prefix", "b"]
    reference = Driver()
    reference.prompts = driver.prompts
    reference.store(a, b)
    assert bytes(driver.source.kept["b"].data) == bytes(reference.source.kept["b"].data)
    again = driver.submit(a, b)
    driver.finish(again)
    assert again.generation.result(0).usage.healed_chunks == 0
    driver.assert_idle()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_read_is_staged_for_the_device_by_who_read_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(21, "b")
    driver.store(a, b)
    staged: list[ChunkKV] = []

    def stage(kv: ChunkKV) -> ChunkKV:
        if fails:
            raise MemoryError
        staged.append(ChunkKV(kv.layout, kv.num_tokens, bytearray(kv.data)))
        return staged[-1]

    imported: list[ChunkKV] = []
    copy = driver.lane.kv_cache.import_chunk
    monkeypatch.setattr(driver.lane.kv_cache, "staged", stage)
    monkeypatch.setattr(
        driver.lane.kv_cache, "import_chunk", lambda kv, blocks: (imported.append(kv), copy(kv, blocks))[1]
    )
    sequence = driver.submit(a, b)
    driver.finish(sequence)
    assert len(imported) == 3  # with the prefix
    assert (imported == staged) == (not fails)
    assert sequence.generation.result(0).usage.healed_chunks == 0
    driver.assert_idle()


def test_healing_is_a_pass_of_its_own(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    driver.submit(a, tail=7, max_tokens=1)
    driver.run()
    assert [batch.num_tokens for batch in driver.runner.batches] == [13, 40, 7]


def test_one_healing_serves_all_who_wait_for_it(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    first, second = driver.submit(a), driver.submit(a)
    driver.finish(first)
    driver.finish(second)
    assert driver.source.writes == ["prefix", "a"]
    healed = [s.generation.result(0).usage.healed_chunks for s in (first, second)]
    assert healed == [2, 0]
    driver.assert_idle()


def test_when_the_first_who_waits_gives_up_the_healing_goes_on_for_the_second(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    first, second = driver.submit(a), driver.submit(a)
    driver.step("fill")  # the prefix
    driver.lane.cancel(first)
    driver.finish(second)
    driver.assert_idle()


def test_strict_fails_where_a_chunk_is_missing_and_leaves_others_alone(driver: Driver) -> None:
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(21, "b")
    driver.store(a)
    strict = driver.submit(a, b, reuse="strict")
    auto = driver.submit(b, a)
    fine = driver.submit(a, reuse="strict")
    driver.finish(auto)
    with pytest.raises(ReuseUnavailable, match="chunk b"):
        strict.generation.result(0)
    driver.finish(fine)
    driver.assert_idle()


def test_strict_does_not_ask_for_what_the_policy_computes_anyway(driver: Driver) -> None:
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(21, "b")
    driver.store(a)
    driver.finish(driver.submit(a, b, policy=Exact(), reuse="strict"))
    assert "b" not in driver.source.reads


def test_off_reads_nothing_and_maps_nothing(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    driver.store(a)
    sequence = driver.submit(a, reuse="off")
    driver.finish(sequence)
    usage = sequence.generation.result(0).usage
    assert (usage.cached_tokens, usage.blocks_shared) == (0, 0)
    assert usage.prefilled_tokens == usage.prompt_tokens
    assert driver.source.reads == []


def test_a_source_that_fails_fails_one_request_only(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    driver.store(a)

    def broken(ref: ChunkRef) -> ChunkKV | None:
        raise Overloaded("the database is busy", hint="wait")

    driver.loader.hold = True
    healthy, driver.source = driver.source, MemorySource(broken)
    first = driver.submit(a)
    driver.source = healthy
    second = driver.submit(a)
    driver.settle()
    driver.loader.come_back()
    driver.finish(second)
    with pytest.raises(Overloaded, match="busy"):
        first.generation.result(0)
    driver.assert_idle()


def test_stored_kv_of_another_shape_is_not_used(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    driver.store(a, driver.prompts.chunk(39, "other"))
    driver.source.kept["a"] = driver.source.kept["other"]
    sequence = driver.submit(a)
    driver.finish(sequence)
    assert sequence.generation.result(0).usage.healed_chunks == 1
    assert driver.source.kept["a"].num_tokens == 40


def test_a_read_that_does_not_return_in_time_fails_who_waits_for_it() -> None:
    driver = Driver(queue_seconds=5.0)
    a = driver.prompts.chunk(40, "a")
    driver.store(a)
    driver.loader.hold = True
    stuck = driver.submit(a)
    driver.settle()
    driver.now = driver.lane.next_deadline()
    driver.settle()
    with pytest.raises(MemKVError, match="could not be read within 5 seconds"):
        stuck.generation.result(0)
    driver.assert_idle()


def test_who_comes_when_a_late_read_is_given_up_has_one_of_its_own() -> None:
    """Something was to be computed behind the late chunk, and held it."""
    driver = Driver(queue_seconds=5.0)
    a = driver.prompts.chunk(40, "a")
    driver.store(driver.prompts.prefix)
    driver.loader.hold = True
    stuck = driver.submit(a)
    driver.settle()
    driver.loader.come_back("a")  # nothing there: it waits for the prefix
    driver.settle()
    driver.now = driver.lane.next_deadline()
    again = driver.submit()
    driver.lane.settle(driver.now)
    assert stuck.is_finished
    driver.loader.pending.clear()  # the late read never returns
    driver.settle()
    assert again in driver.lane.scheduler.loading
    driver.now = driver.lane.next_deadline()
    driver.settle()
    with pytest.raises(MemKVError, match="could not be read within 5 seconds"):
        again.generation.result(0)
    driver.assert_idle()


def test_a_fetch_into_host_memory_that_does_not_return_fails_who_waits_for_it() -> None:
    driver = Driver(queue_seconds=5.0, host_bytes=2**20)
    a = driver.prompts.chunk(40, "a")
    driver.store(driver.prompts.prefix, a)
    driver.loader.hold = True
    driver.lane.prefetch([a], driver.source, to_host=True)
    stuck = driver.submit(a)
    driver.settle()
    driver.loader.come_back("prefix")
    driver.settle()
    driver.now = driver.lane.next_deadline()
    driver.settle()
    with pytest.raises(MemKVError, match="could not be read within 5 seconds"):
        stuck.generation.result(0)
    driver.loader.come_back()
    driver.settle()
    driver.assert_idle()
    assert driver.lane.is_idle


def test_a_lane_is_not_idle_while_a_chunk_is_copied(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = driver.prompts.chunk(40)
    driver.store(chunk)
    over: list[bool] = []
    monkeypatch.setattr(Stopwatch, "is_over", property(lambda watch: bool(over)))
    driver.loader.hold = False
    driver.lane.prefetch([chunk], driver.source)
    driver.settle()
    assert driver.lane.is_moving and not driver.lane.is_idle
    over.append(True)
    driver.run()
    assert driver.lane.is_idle


@pytest.mark.parametrize("fails", [True, False])
def test_a_prefix_that_is_dropped_and_then_not_found_strands_nobody(driver: Driver, fails: bool) -> None:
    """Two wait for one chunk, behind two lives of the same prefix; the first one gives up."""
    a = driver.prompts.chunk(40, "a")
    driver.loader.hold = True
    first = driver.submit(a)
    driver.settle()
    driver.loader.come_back("a")  # nothing there: it is to be computed behind the first life
    driver.settle()
    driver.lane.residency.drop(["prefix"])
    second = driver.submit(a)
    driver.settle()
    driver.lane.cancel(first)
    driver.settle()

    def broken(ref: ChunkRef) -> ChunkKV | None:
        raise Overloaded("the database is busy")

    driver.source.on_read = broken if fails else None
    one, other = driver.loader.pending
    assert one[0] == other[0] == "prefix"
    one[1]()
    driver.source.on_read = None
    driver.loader.pending = [other]
    driver.loader.come_back()
    driver.finish(second)
    driver.assert_idle()


@pytest.mark.parametrize("cancel", [False, True])
def test_a_chunk_may_be_mapped_when_its_copy_has_ended(cancel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU copies it: until then its blocks are nobody else's, whatever becomes of those who wait."""
    driver = Driver(num_blocks=32)
    chunk = driver.prompts.chunk(40)
    driver.store(driver.prompts.prefix, chunk)
    over: list[bool] = []
    monkeypatch.setattr(Stopwatch, "is_over", property(lambda watch: bool(over)))
    sequence = driver.submit(chunk, max_tokens=3)
    driver.loader.hold = False
    driver.settle()
    driver.settle()
    assert driver.lane.is_moving and not driver.lane.has_generations
    counts = driver.lane.residency.counts()
    if cancel:
        driver.lane.cancel(sequence)
        assert driver.lane.residency.counts().pinned == counts.pinned > 0
        over.append(True)
        driver.run()
        assert driver.lane.residency.counts().pinned == 0
        assert driver.lane.residency.knows(chunk)
        return
    over.append(True)
    driver.finish(sequence)
    assert not driver.source.writes


def test_the_stages_of_answers_add_up(driver: Driver) -> None:
    chunk = driver.prompts.chunk(40)
    driver.store(driver.prompts.prefix, chunk)
    results = []
    for _ in range(2):
        sequence = driver.submit(chunk, max_tokens=3)
        driver.loader.hold = False
        driver.finish(sequence)
        results.append(sequence.generation.result(0).timings)
    counters = driver.lane.stats().counters
    assert counters.answers == 2
    for stage in ("queue", "load", "look", "prefill"):
        spent = sum(getattr(timings, f"{stage}_ms") for timings in results)
        assert getattr(counters, f"{stage}_seconds") == pytest.approx(spent / 1e3)
    after_first = sum(timings.total_ms - timings.ttft_ms for timings in results)
    assert counters.decode_seconds == pytest.approx(after_first / 1e3)
    assert counters.source_loaded_bytes == FAKE_LAYOUT.bytes_for(13) + FAKE_LAYOUT.bytes_for(40)
