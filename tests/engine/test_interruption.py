"""Blocks of answers are taken one by one; where they run out, the last one waits and computes them again."""

from __future__ import annotations

import pytest
from engine_harness import FAKE_LAYOUT, fake_answer
from lane_driver import Driver

from memkv.engine.batch import Batch
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import Exact, Head, Map, ReusePolicy, Select
from memkv.engine.reuse.order import Order
from memkv.engine.sequence import Sequence

SIZE = FAKE_LAYOUT.block_size


def without_prefix(num_blocks: int, **changes: float) -> Driver:
    driver = Driver(num_blocks=num_blocks, continuation_share=0.0, **changes)
    driver.prompts.prefix = ChunkRef("prefix", (), ())
    return driver


def interruptions(sequence: Sequence) -> int:
    return sequence.generation.result(0).usage.interruptions


def test_an_answer_takes_a_block_when_it_needs_one() -> None:
    driver = without_prefix(8)
    long = driver.submit(tail=10, max_tokens=7 * SIZE)
    driver.settle()
    assert driver.lane.residency.counts().private == 1
    for _ in range(8):
        driver.step()
    assert driver.lane.residency.counts().private == 2
    driver.finish(long)
    assert interruptions(long) == 0
    driver.assert_idle()


def test_who_was_admitted_last_gives_way_and_goes_on_where_it_was() -> None:
    driver = without_prefix(8)
    first = driver.submit(tail=10, max_tokens=6 * SIZE)
    second = driver.submit(tail=10, max_tokens=6 * SIZE)
    behind = driver.submit(tail=8 * SIZE, max_tokens=1)
    driver.settle()
    while second not in driver.lane.scheduler.waiting:
        assert driver.step()
    assert list(driver.lane.scheduler.waiting) == [second, behind]  # as the foremost
    assert driver.lane.residency.counts().private == 5
    had = second.num_generated
    assert had > SIZE
    assert driver.lane.next_deadline() == behind.deadline
    driver.finish(first)
    driver.finish(second)
    driver.finish(behind)
    assert (interruptions(first), interruptions(second)) == (0, 1)
    prompts = [batch for batch in driver.runner.batches if batch.num_tokens >= 10 + had]
    assert len(prompts) == 2  # the answer as far as it was, and `behind`
    driver.assert_idle()


def test_nobody_is_told_twice_and_nothing_is_lost() -> None:
    driver = without_prefix(8)
    first, second = (driver.submit(tail=10, max_tokens=6 * SIZE) for _ in range(2))
    driver.finish(first)
    driver.finish(second)
    events = [event.token_id for event in second.generation]
    assert events == second.generation.result(0).token_ids
    assert second.generation.result(0).usage.completion_tokens == 6 * SIZE


@pytest.mark.parametrize("policy", [Exact(), Map(), Head(1), Select(0.5), Order()])
@pytest.mark.parametrize("keep_logits", [0, 5])
def test_an_interrupted_answer_is_the_one_that_it_would_have_been(
    policy: ReusePolicy, keep_logits: int
) -> None:
    """Mapped chunks, chosen blocks, kept logits: alone and beside others that take its blocks."""
    driver = Driver(num_blocks=32, continuation_share=0.25)
    chunks = [driver.prompts.chunk(size, f"c{size}") for size in (40, 50, 33)]
    driver.store(*chunks)
    tails = [driver.prompts.ids(7) for _ in range(4)]
    alone = driver.submit(*chunks, tail=tails[-1], policy=policy, max_tokens=100, keep_logits=keep_logits)
    driver.finish(alone)
    if not isinstance(policy, Order):  # which finds what others left
        driver.lane.continuations.drop(["prefix"])
    together = [
        driver.submit(*chunks, tail=tail, policy=policy, max_tokens=100, keep_logits=keep_logits)
        for tail in tails
    ]
    for sequence in together:
        driver.finish(sequence)
    assert sum(map(interruptions, together)) > 0
    expected, result = alone.generation.result(0), together[-1].generation.result(0)
    assert result.token_ids == expected.token_ids
    assert result.logit_positions == expected.logit_positions
    assert result.usage.prompt_tokens == expected.usage.prompt_tokens
    if keep_logits:
        assert len(result.logit_positions) == len(result.logits) == keep_logits + 99  # type: ignore[arg-type]
        assert (result.logits == expected.logits).all()  # type: ignore[union-attr]
    driver.assert_idle()


def test_a_chunk_that_is_healed_again_after_an_interruption_counts_once() -> None:
    """The source keeps nothing, so that whoever comes back to an evicted chunk has it computed again."""
    driver = without_prefix(10)
    driver.source.write = lambda ref, kv: None  # type: ignore[method-assign]
    older = driver.submit(tail=10, max_tokens=6 * SIZE)
    chunk = driver.prompts.chunk(3 * SIZE, "c")
    younger = driver.submit(chunk, tail=10, max_tokens=6 * SIZE, policy=Map())
    driver.finish(older)
    driver.finish(younger)
    result = younger.generation.result(0)
    assert result.usage.interruptions == 1 and driver.lane.stats().healed_chunks == 2
    assert result.usage.healed_chunks == 1
    assert result.usage.prefilled_tokens == 10 + 3 * SIZE and result.usage.cached_tokens == 0


def test_a_seed_draws_the_same_tokens_after_an_interruption() -> None:
    answers = []
    for others in (0, 3):
        driver = without_prefix(20)
        tail = driver.prompts.ids(9)
        for _ in range(others):
            driver.submit(tail=10, max_tokens=6 * SIZE)
        drawn = driver.submit(tail=tail, max_tokens=6 * SIZE, temperature=2.0, seed=3)
        driver.run()
        answers.append(drawn.generation.result(0))
    assert answers[0].token_ids == answers[1].token_ids
    assert (answers[0].usage.interruptions, answers[1].usage.interruptions > 0) == (0, True)


def test_one_that_is_cancelled_while_it_waits_again_keeps_what_it_had() -> None:
    driver = without_prefix(8)
    first, second = (driver.submit(tail=10, max_tokens=6 * SIZE) for _ in range(2))
    driver.settle()
    while second not in driver.lane.scheduler.waiting:
        assert driver.step()
    driver.lane.cancel(second)
    driver.finish(first)
    result = second.generation.result(0)
    assert result.finish_reason == "cancelled"
    assert result.token_ids == fake_answer(second.asked.request.prompt_ids.tolist(), len(result.token_ids))
    assert result.usage.prefilled_tokens == 10 and result.usage.completion_tokens == len(result.token_ids) > 0
    driver.assert_idle()


def test_jobs_and_answers_in_a_full_pool_all_end() -> None:
    driver = Driver(num_blocks=24)
    chunks = [driver.prompts.chunk(40 + index, f"c{index}") for index in range(10)]
    job = driver.submit_job(*chunks)
    answers = [driver.submit(tail=20, max_tokens=8 * SIZE) for _ in range(5)]
    for sequence in answers:
        driver.finish(sequence)
    assert len(driver.chunks_of(job)) == 10
    driver.assert_idle()


def test_a_batch_is_never_built_of_one_that_was_interrupted() -> None:
    """A token that was sampled before its sequence was interrupted in the same step still counts."""
    driver = without_prefix(6)
    sequences = [driver.submit(tail=SIZE, max_tokens=3 * SIZE) for _ in range(3)]
    seen: list[Batch] = []
    driver.runner.before = seen.append
    for sequence in sequences:
        driver.finish(sequence)
    assert sum(map(interruptions, sequences)) >= 2
    computed = sum(batch.num_tokens for batch in seen)
    assert computed >= 3 * (SIZE + 3 * SIZE - 1)
    driver.assert_idle()
