"""One lane by hand: what is shared, what a step takes, and books that balance after each."""

from __future__ import annotations

import pytest
from engine_harness import (
    FAKE_LAYOUT,
)
from lane_driver import Driver

from memkv.engine.reuse import Exact, Head, Map, Select
from memkv.engine.scheduler import Task
from memkv.engine.sequence import Sequence

SIZE = FAKE_LAYOUT.block_size


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_chunks_are_read_mapped_and_left_resident(driver: Driver) -> None:
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(21, "b")
    driver.store(a, b)
    sequence = driver.submit(a, b, tail=7)
    driver.finish(sequence)
    usage = sequence.generation.result(0).usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.prefilled_tokens) == (81, 74, 7)
    assert (usage.blocks_shared, usage.blocks_fresh, usage.healed_chunks) == (1 + 3 + 2, 1, 0)
    assert sorted(driver.source.reads) == ["a", "b", "prefix"]
    again = driver.submit(b, a)
    driver.finish(again)
    assert len(driver.source.reads) == 3  # all were here
    driver.assert_idle()


def test_two_sequences_that_map_a_chunk_at_different_positions_hold_the_same_blocks(driver: Driver) -> None:
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(21, "b")
    driver.store(a, b)
    first, second = driver.submit(a, b), driver.submit(b, a)
    driver.settle()
    tables = [sequence.run.table for sequence in (first, second) if sequence.run]
    a_segments = [next(s for s in t.segments if s.num_tokens == 40) for t in tables]
    b_segments = [next(s for s in t.segments if s.num_tokens == 21) for t in tables]
    assert a_segments[0].blocks == a_segments[1].blocks
    assert b_segments[0].blocks == b_segments[1].blocks
    assert [s.position for s in a_segments] == [13, 13 + 21]
    assert [s.position for s in b_segments] == [13 + 40, 13]
    assert {s.stored_position for s in a_segments + b_segments} == {13}
    driver.finish(first)
    driver.finish(second)
    driver.assert_idle()


def test_64_sequences_over_10_chunks_in_64_orders_take_private_blocks_only() -> None:
    driver = Driver(400)
    chunks = [driver.prompts.chunk(32 + i, f"c{i}") for i in range(10)]
    driver.store(*chunks)
    orders = [driver.prompts.random.sample(chunks, 10) for _ in range(64)]
    sequences = [driver.submit(*order) for order in orders]
    driver.settle()
    shared = 1 + sum(FAKE_LAYOUT.blocks_for(chunk.num_tokens) for chunk in chunks)
    counts = driver.lane.residency.counts()
    assert len(driver.lane.scheduler.running) == 64
    assert (counts.pinned, counts.private) == (shared, 64)
    assert len(driver.source.reads) == 11
    for sequence in sequences:
        driver.finish(sequence)
    driver.assert_idle()


def test_fresh_blocks_stand_in_for_some_and_leave_the_others_shared(driver: Driver) -> None:
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(37, "b")
    driver.store(a, b)
    plain, head = driver.submit(a, b), driver.submit(a, b, policy=Head(1))
    driver.settle()
    assert plain.run and head.run
    last = next(s for s in plain.run.table.segments if s.num_tokens == 37)
    mine = [s for s in head.run.table.segments if s.position >= 13 + 40][:2]
    assert mine[0].private and mine[0].num_tokens == 16
    assert mine[1].blocks == last.blocks[1:]
    assert head.run.positions[:17].tolist() == [*range(53, 69), 90]
    driver.finish(head)
    assert head.generation.result(0).usage.prefilled_tokens == 16 + 5
    assert head.generation.result(0).usage.cached_tokens == 13 + 40 + 21


def test_one_step_takes_all_that_is_new_and_one_token_of_each_that_runs(driver: Driver) -> None:
    a = driver.prompts.chunk(40, "a")
    driver.store(a)
    old = [driver.submit(a, tail=3, max_tokens=10) for _ in range(2)]
    driver.step("generation")
    new = [driver.submit(a, tail=6, max_tokens=3), driver.submit(a, a, tail=9, policy=Exact(), max_tokens=3)]
    driver.step("generation")
    assert sorted(map(len, driver.runner.batches[-1].positions)) == [1, 1, 6, 49]
    for sequence in (*old, *new):
        driver.finish(sequence)


def test_a_long_prompt_is_taken_in_parts_in_order_of_position() -> None:
    driver = Driver(max_batch_tokens=32)
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(50, "b")
    driver.store(a, b)
    long = driver.submit(a, b, tail=20, policy=Head(2))
    driver.run()
    sizes = [batch.num_tokens for batch in driver.runner.batches]
    assert sizes == [32, 20, 1, 1, 1]
    assert [len(batch.logit_rows) for batch in driver.runner.batches] == [0, 1, 1, 1, 1]
    taken = [p for batch in driver.runner.batches[:2] for of_owner in batch.positions for p in of_owner]
    assert taken == sorted(taken)
    driver.finish(long)


def test_logits_are_kept_of_a_prompt_taken_in_parts() -> None:
    driver = Driver(max_batch_tokens=8)
    driver.store()
    sequence = driver.submit(tail=20, max_tokens=2, keep_logits=7)
    driver.finish(sequence)
    assert [len(batch.logit_rows) for batch in driver.runner.batches] == [0, 3, 4, 1]
    assert sequence.generation.result(0).logit_positions == tuple(range(13 + 13, 13 + 21))


def test_answers_come_before_prompts_and_no_step_exceeds_its_tokens() -> None:
    driver = Driver(max_batch_tokens=3)
    driver.store()
    sequences = [driver.submit(tail=4, max_tokens=6) for _ in range(5)]
    going = True
    while going:
        before = [(each, each.num_generated) for each in sequences]
        going = driver.step()
        for sequence, count in before:
            if count and going and not sequence.is_finished:
                assert sequence.num_generated == count + 1
    assert max(batch.num_tokens for batch in driver.runner.batches) == 3
    for sequence in sequences:
        driver.finish(sequence)
    driver.assert_idle()


def test_no_step_runs_the_head_for_tokens_without_need(driver: Driver) -> None:
    job = driver.submit_job(driver.prompts.chunk(40, "a"))
    driver.run()
    assert all(batch.logit_rows == [] for batch in driver.runner.batches)
    driver.submit(tail=9, max_tokens=3)
    driver.run()
    assert [len(batch.logit_rows) for batch in driver.runner.batches[-3:]] == [1, 1, 1]
    assert len(driver.chunks_of(job)) == 1


def test_the_tables_of_a_busy_lane_stay_sound() -> None:
    """Many requests of every kind, with cancels: the books are checked after every step."""
    driver = Driver(num_blocks=64, max_batch_tokens=100)
    random = driver.prompts.random
    chunks = [driver.prompts.chunk(random.randint(1, 60), f"c{i}") for i in range(12)]
    driver.store(*chunks[:6])
    tasks: list[Task] = []
    for _ in range(60):
        if random.random() < 0.2:
            tasks.append(driver.submit_job(*random.sample(chunks, 4)))
        else:
            sequence = driver.submit(
                *random.sample(chunks, random.randint(0, 5)),
                tail=random.randint(1, 30),
                max_tokens=random.randint(1, 20),
                policy=random.choice([Exact(), Map(), Head(1), Select(0.3)]),
                reuse=random.choice(["auto", "off"]),
            )
            tasks.append(sequence)
        for _ in range(random.randint(0, 4)):
            driver.step(random.choice(["", "fill", "generation"]))
        live = [task for task in tasks if not task.is_finished]
        if live and random.random() < 0.3:
            driver.lane.cancel(random.choice(live))
        if random.random() < 0.2:
            driver.lane.residency.drop([random.choice(chunks).input_key])
    driver.run()
    for sequence in [task for task in tasks if isinstance(task, Sequence)]:
        if sequence.generation.finish_reason != "cancelled":
            driver.finish(sequence)
    assert all(task.is_finished for task in tasks)
    driver.assert_idle()
