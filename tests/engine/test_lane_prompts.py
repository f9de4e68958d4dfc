"""A long prompt does not hold up the answers of others for longer than a step's time."""

from __future__ import annotations

import time

import pytest
from lane_driver import Driver

from memkv.engine.batch import Batch
from memkv.engine.reuse import Exact, Select


def prompt_tokens(batch: Batch) -> int:
    return max(len(positions) for positions in batch.positions)


def fix_pace(driver: Driver, tokens_per_second: float) -> None:
    pace = driver.lane.steps.prompt_pace
    pace.tokens_per_second = tokens_per_second
    pace.observe = lambda num_tokens, seconds: None  # type: ignore[method-assign]


@pytest.fixture
def driver() -> Driver:
    driver = Driver(num_blocks=300)
    driver.store()
    return driver


def test_a_prompt_alone_is_one_step(driver: Driver) -> None:
    driver.finish(driver.submit(tail=2000, max_tokens=1))
    assert driver.runner.batches[-1].num_tokens == 2000


def test_a_prompt_beside_an_answer_is_taken_in_parts(driver: Driver) -> None:
    answering = driver.submit(tail=5, max_tokens=40)
    driver.step("generation")
    fix_pace(driver, 2000.0)
    driver.runner.batches.clear()
    long, other = driver.submit(tail=1500, max_tokens=3), driver.submit(tail=10, max_tokens=3)
    driver.finish(answering)
    sizes = [batch.num_tokens for batch in driver.runner.batches]
    assert sizes[:6] == [301, 301, 301, 301, 301, 12]  # 0.15 s of prompts, and a token of each answer
    assert [len(batch.logit_rows) for batch in driver.runner.batches][:5] == [1, 1, 1, 1, 2]
    for sequence in (long, other):
        driver.finish(sequence)
    driver.assert_idle()


def test_a_part_takes_about_as_long_as_it_may(driver: Driver) -> None:
    """A step of n tokens takes n / 2000 seconds; nobody has told the lane."""
    driver.runner.before = lambda batch: time.sleep(batch.num_tokens / 2000)
    answering = driver.submit(tail=5, max_tokens=40)
    driver.step("generation")
    driver.runner.batches.clear()
    long = driver.submit(tail=2500, max_tokens=1)
    driver.finish(long)
    sizes = [prompt_tokens(batch) for batch in driver.runner.batches]
    assert sizes[0] == 256
    assert all(200 < size < 310 for size in sizes[1:8]), sizes
    driver.finish(answering)


def test_a_look_and_what_follows_it_are_taken_in_parts_too(driver: Driver) -> None:
    chunks = [driver.prompts.chunk(200, f"c{index}") for index in range(4)]
    driver.store(*chunks)
    answering = driver.submit(tail=5, max_tokens=40)
    driver.step("generation")
    fix_pace(driver, 1.0)
    driver.runner.batches.clear()
    sequences = [
        driver.submit(*chunks, policy=policy, tail=150) for policy in (Select(0.5), Exact(), Select(1.0))
    ]
    for sequence in (*sequences, answering):
        driver.finish(sequence)
    sizes = [sum(map(len, batch.positions)) for batch in driver.runner.batches[:12]]
    assert max(sizes) <= 64 + 4
    driver.assert_idle()


def test_little_steps_do_not_count_as_slow(driver: Driver) -> None:
    driver.finish(driver.submit(tail=20, max_tokens=9))
    assert driver.lane.steps.prompt_pace.tokens_per_second == 0.0
    driver.finish(driver.submit(tail=200, max_tokens=9))
    assert driver.lane.steps.prompt_pace.tokens_per_second > 0.0
