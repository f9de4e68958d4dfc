"""One lane by hand: chunks prefilled for an ingest, beside queries that want the same blocks."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import FAKE_LAYOUT, FAKE_VOCAB, RandomPrompts
from lane_driver import Driver

from memkv.engine.kv_cache import Export
from memkv.engine.residency import ChunkRef
from memkv.errors import ModelError, Overloaded

SIZE = FAKE_LAYOUT.block_size


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_job_gets_every_chunk_in_packed_passes_behind_one_prefix(driver: Driver) -> None:
    chunks = [driver.prompts.chunk(20 + i, f"c{i}") for i in range(5)]
    job = driver.submit_job(*chunks)
    driver.run()
    found = driver.chunks_of(job)
    assert sorted(found) == list(range(5))
    assert [found[i].num_tokens for i in range(5)] == [20, 21, 22, 23, 24]
    assert [batch.num_tokens for batch in driver.runner.batches] == [13, 110]
    assert driver.source.writes == ["prefix"]
    driver.assert_idle()
    driver.source.kept.update({ref.input_key: found[i] for i, ref in enumerate(chunks)})
    other = Driver()
    other.source = driver.source
    other.finish(other.submit(*chunks))  # what was exported maps to the right answer
    assert other.source.writes == ["prefix"]


def test_the_same_chunk_twice_is_computed_once(driver: Driver) -> None:
    a = driver.prompts.chunk(20, "a")
    job = driver.submit_job(a, a)
    driver.run()
    assert sorted(driver.chunks_of(job)) == [0, 1]
    assert [batch.num_tokens for batch in driver.runner.batches] == [13, 20]
    again = driver.submit_job(a)
    driver.run()
    assert sorted(driver.chunks_of(again)) == [0]
    assert len(driver.runner.batches) == 2  # it was still here
    driver.assert_idle()


def test_a_job_takes_turns_and_a_small_pool_suffices() -> None:
    driver = Driver(num_blocks=8)
    chunks = [driver.prompts.chunk(40, f"c{i}") for i in range(6)]
    jobs = [driver.submit_job(*chunks[:3]), driver.submit_job(*chunks[3:])]
    driver.run()
    assert [sorted(driver.chunks_of(job)) for job in jobs] == [[0, 1, 2]] * 2
    driver.assert_idle()


def test_jobs_of_many_collections_do_not_lock_one_another_out() -> None:
    driver = Driver(num_blocks=8)
    jobs = []
    for number in range(7):
        prefix = ChunkRef(f"p{number}", (), driver.prompts.ids(20))
        chunk = ChunkRef(f"c{number}", prefix.token_ids, driver.prompts.ids(60))
        jobs.append(driver.submit_job(chunk, prefix=prefix))
    driver.run()
    assert [sorted(driver.chunks_of(job)) for job in jobs] == [[0]] * 7
    driver.assert_idle()


def test_a_query_that_waits_for_blocks_goes_before_the_rest_of_a_job() -> None:
    driver = Driver(num_blocks=16)
    job = driver.submit_job(*(driver.prompts.chunk(60, f"c{i}") for i in range(20)))
    driver.settle()
    driver.now = 1.0
    query = driver.submit(tail=9 * SIZE, max_tokens=1)
    for _ in range(5):
        driver.step("fill")
        driver.now += 1
        if query in driver.lane.scheduler.running:
            break
    assert query in driver.lane.scheduler.running
    assert job.next_chunk < 10
    driver.finish(query)
    assert len(driver.chunks_of(job)) == 20
    driver.assert_idle()


def test_a_job_that_finds_no_blocks_in_time_is_told_so() -> None:
    driver = Driver(num_blocks=8, queue_seconds=5.0)
    hog = driver.submit(tail=6 * SIZE, max_tokens=SIZE)
    driver.settle()
    job = driver.submit_job(driver.prompts.chunk(40, "a"))
    driver.settle()
    driver.now = driver.lane.next_deadline()
    assert driver.now == 5.0
    driver.settle()
    assert isinstance(job.events.get(), Overloaded)
    driver.finish(hog)
    driver.assert_idle()


def test_a_job_that_gets_on_is_not_told_so_however_long_it_takes() -> None:
    driver = Driver(num_blocks=8, queue_seconds=5.0)
    driver.store()
    hog = driver.submit(tail=SIZE, max_tokens=4 * SIZE)
    driver.settle()
    job = driver.submit_job(*(driver.prompts.chunk(20, f"c{i}") for i in range(4)))
    for _ in range(6):
        driver.settle()
        assert (
            job.blocked_since is not None or job.all_started
        )  # two blocks are free: room for one chunk at a time
        driver.now += 4.0
        driver.step("fill")
        if job.is_finished:
            break
    assert job.is_finished
    assert len(driver.chunks_of(job)) == 4
    driver.finish(hog)


def test_a_cancelled_job_gives_everything_back(driver: Driver) -> None:
    job = driver.submit_job(*(driver.prompts.chunk(60, f"c{i}") for i in range(4)))
    for _ in range(2):
        driver.settle()
        driver.lane.steps.pace.tokens_per_second = 50.0  # short steps, so that it is caught in the middle
        driver.step("fill")
    assert driver.lane.has_fills
    driver.lane.cancel(job)
    driver.settle()
    driver.assert_idle()
    assert not driver.lane.has_fills


def test_a_query_may_wait_for_what_a_job_computes_and_outlive_it(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    job = driver.submit_job(a)
    driver.settle()
    query = driver.submit(a)
    driver.settle()
    driver.lane.cancel(job)
    driver.finish(query)
    assert query.generation.result(0).usage.healed_chunks == 0
    driver.assert_idle()


def test_what_a_query_waits_for_is_computed_before_the_rest_of_a_job() -> None:
    driver = Driver(num_blocks=256)
    driver.store()
    chunks = [driver.prompts.chunk(60, f"c{i}") for i in range(20)]
    driver.submit_job(*chunks)
    driver.settle()
    query = driver.submit(chunks[17])
    driver.settle()
    driver.lane.steps.pace.tokens_per_second = 1.0
    driver.step("fill")
    assert query in driver.lane.scheduler.running
    driver.finish(query)


def test_kv_that_is_not_finite_is_refused_and_not_kept(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    driver.store(a)
    del driver.source.kept["a"]
    run = driver.runner.run

    def infect(batch: Any, cache: Any) -> Any:
        result = run(batch, cache)
        for slot in batch.slots:
            cache.layer(0)[1][slot // SIZE, 0, 3, slot % SIZE] = float("inf")
        return result

    driver.runner.run = infect  # type: ignore[method-assign]
    job, query = driver.submit_job(a), driver.submit(driver.prompts.chunk(25, "b"))
    driver.run()
    assert isinstance(job.events.get(), ModelError)
    with pytest.raises(ModelError, match="finite"):
        query.generation.result(0)
    assert driver.source.writes == []
    driver.assert_idle()
    driver.runner.run = run  # type: ignore[method-assign]
    driver.finish(driver.submit(a))


def test_logits_that_are_not_finite_fail_their_own_request_only(driver: Driver) -> None:
    run = driver.runner.run

    def infect(batch: Any, cache: Any) -> Any:
        result = run(batch, cache)
        result.logits[0] = float("nan")
        return result

    driver.store()

    driver.runner.run = infect  # type: ignore[method-assign]
    bad, good = driver.submit(max_tokens=1), driver.submit(max_tokens=1)
    driver.finish(good)
    with pytest.raises(ModelError, match="logits"):
        bad.generation.result(0)
    driver.assert_idle()


def test_background_steps_are_short_while_a_query_waits() -> None:
    driver = Driver(num_blocks=256)
    driver.store()
    driver.submit_job(*(driver.prompts.chunk(60, f"c{i}") for i in range(20)))
    driver.settle()
    for shared, tokens in ((True, 150), (False, 500)):
        driver.lane.steps.pace.tokens_per_second = 1000.0
        driver.do(driver.lane.fill_work(shared=shared))
        assert driver.runner.batches[-1].num_tokens == tokens


@pytest.fixture
def slow_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed chunks take for ever to come to the host, unless somebody waits for them."""
    monkeypatch.setattr(Export, "is_over", property(lambda self: False))


def test_steps_go_on_while_chunks_are_on_their_way_to_the_host(slow_exports: None) -> None:
    driver = Driver(num_blocks=64, max_batch_tokens=60)
    chunks = [driver.prompts.chunk(30 + index, f"c{index}") for index in range(6)]
    job = driver.submit_job(*chunks)
    driver.step()  # the prefix
    assert driver.lane.is_moving and not driver.lane.has_fills
    answering = driver.submit(tail=8, max_tokens=10, reuse="off")
    for _ in range(5):
        driver.step("generation")
    assert answering.num_generated == 5  # nobody waited for it
    driver.finish(answering)
    found = driver.chunks_of(job)
    assert sorted(found) == list(range(6))
    plain = Driver()
    expected = plain.submit_job(*chunks)
    plain.run()
    for index, kv in plain.chunks_of(expected).items():
        assert bytes(found[index].data) == bytes(kv.data)
    driver.assert_idle()


def test_a_job_that_is_cancelled_while_its_chunks_are_on_their_way_leaves_nothing(slow_exports: None) -> None:
    driver = Driver()
    job = driver.submit_job(*(driver.prompts.chunk(30, f"c{index}") for index in range(3)))
    driver.step()
    driver.lane.cancel(job)
    driver.settle()
    assert driver.lane.is_moving
    driver.run()
    driver.assert_idle()
    assert driver.lane.residency.counts().cached == 0


@pytest.mark.parametrize("ends", ["cancelled", "expired"])
def test_what_nobody_waits_for_any_more_is_not_computed_into_others_blocks(ends: str) -> None:
    """A question gets the blocks of a chunk, or of the prefix before it, as soon as they are given up."""
    driver = Driver(num_blocks=8, queue_seconds=5.0, host_bytes=2**20)
    other = RandomPrompts(FAKE_VOCAB, prefix_tokens=20, seed=1).prefix
    driver.store(other)
    driver.source.kept = {other.input_key: driver.source.kept[other.input_key]}
    driver.lane.prefetch([other], driver.source, to_host=True)
    holder = driver.submit(tail=3 * SIZE, max_tokens=SIZE, prefix=ChunkRef("none", (), ()))
    job = driver.submit_job(driver.prompts.chunk(3 * SIZE, "a"), driver.prompts.chunk(SIZE * 2, "b"))
    driver.settle()
    assert {fill.chunk.ref.input_key for fill in driver.lane.scheduler.fills} == {"prefix", "a"}
    if ends == "cancelled":
        driver.lane.cancel(job)
    else:
        driver.step("fill")
        assert job.blocked_since is not None
        driver.now += driver.config.queue_seconds
    question = driver.submit(tail=5, max_tokens=2, prefix=other)
    driver.step("fill")
    driver.finish(question)
    driver.finish(holder)
    driver.assert_idle()
