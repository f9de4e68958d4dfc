"""What a step costs the host, and what the host does while the device computes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from engine_harness import FakeRunner, MemorySource, RandomPrompts, config, fake_answer, fake_model, run_ahead
from lane_driver import SIZE, Driver
from test_engine import request_of

from memkv.engine import arrangement, scheduler
from memkv.engine.engine import Engine
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef


def test_a_request_that_does_not_fit_is_not_laid_out_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(num_blocks=8)
    driver.prompts.prefix = ChunkRef("prefix", (), ())
    running = driver.submit(tail=10, max_tokens=3 * SIZE)
    driver.step()
    tries = []

    def counted(*args: Any) -> Any:
        tries.append(args)
        return arrangement.arrangements(*args)

    monkeypatch.setattr(scheduler, "arrangements", counted)
    waiting = driver.submit(tail=6 * SIZE, max_tokens=1)
    for _ in range(20):
        driver.step()
    assert len(tries) == 1
    driver.finish(running)
    driver.finish(waiting)


def test_a_step_does_not_look_at_those_who_wait() -> None:
    """The time of a step is the same beside ten and beside five thousand who wait."""
    seconds = []
    for count in (10, 5000):
        driver = Driver(num_blocks=8)
        driver.prompts.prefix = ChunkRef("prefix", (), ())
        driver.submit(tail=10, max_tokens=6 * SIZE)
        for _ in range(count):
            driver.submit(tail=8, max_tokens=7 * SIZE)
        driver.step()
        taken = []
        for _ in range(40):
            started = time.perf_counter()
            driver.lane.settle(driver.now)
            driver.lane.next_deadline()
            taken.append(time.perf_counter() - started)
        seconds.append(min(taken))
    assert seconds[1] < 5 * seconds[0] + 1e-4


@pytest.fixture
def prompts() -> RandomPrompts:
    return RandomPrompts(1000)


def test_what_is_posted_during_a_step_is_done_before_its_tokens_are_collected(
    prompts: RandomPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel that arrives while the device computes takes effect before that step's token is handed out."""
    runner = FakeRunner()
    monkeypatch.setattr("memkv.engine.engine.ModelRunner", lambda model: runner)
    with Engine(fake_model(), "float32", config()) as engine:
        request = request_of(prompts, max_tokens=500)
        generation = engine.generate(request, MemorySource())
        first = next(iter(generation))
        seen: list[int] = []

        def cancel(batch: Any) -> None:
            seen.append(len(generation._events))
            generation.cancel()

        runner.before = cancel
        result = generation.result(10)
        assert result.finish_reason == "cancelled"
        assert len(result.token_ids) == seen[0]
        assert result.token_ids[0] == first.token_id
        other: GenerateRequest = request_of(prompts, max_tokens=5)
        runner.before = None
        assert engine.generate(other, MemorySource()).result(10).token_ids == fake_answer(
            other.prompt_ids.tolist(), 5
        )
        engine.check_integrity()


def test_a_row_without_finite_logits_fails_alone() -> None:
    driver = Driver()
    driver.store()
    run = driver.runner.run

    def spoiled(batch: Any, kv_cache: Any) -> Any:
        result = run(batch, kv_cache)
        if result.logits is not None and len(result.logits) == 2:
            result.logits[1] = torch.nan
        return result

    driver.runner.run = spoiled  # type: ignore[method-assign]
    good, bad = driver.submit(max_tokens=5), driver.submit(max_tokens=5)
    driver.finish(good)
    assert bad.generation.finish_reason == "error"
    driver.assert_idle()


def ahead(monkeypatch: pytest.MonkeyPatch) -> Driver:
    run_ahead(monkeypatch)
    driver = Driver(num_blocks=32)
    driver.prompts.prefix = ChunkRef("prefix", (), ())
    return driver


def test_a_step_begins_with_a_token_that_only_the_device_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step is submitted ahead of the tokens that were handed out, and no more."""
    driver = ahead(monkeypatch)
    sequence = driver.submit(tail=10, max_tokens=6)
    counts = []
    while not sequence.is_finished:
        driver.step()
        counts.append((len(driver.runner.batches), sequence.num_generated))
    assert counts == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (6, 6)]
    assert [batch.sources.tolist() for batch in driver.runner.batches[1:]] == [[0]] * 5
    assert sequence.generation.result(1).token_ids == fake_answer(sequence.asked.request.prompt_ids, 6)


def test_what_was_computed_behind_the_end_of_an_answer_is_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = ahead(monkeypatch)
    sequence = driver.sequence(tail=10, max_tokens=9, keep_logits=1)
    answer = fake_answer(sequence.asked.request.prompt_ids, 9)
    sequence._eos_token_ids = (answer[4],)
    driver.lane.submit(sequence)
    driver.run()
    result = sequence.generation.result(1)
    assert result.finish_reason == "stop" and result.token_ids == answer[:5]
    assert result.logits is not None and result.logits.argmax(dim=-1).tolist() == answer[:5]
    assert result.logit_positions == (9, 10, 11, 12, 13)
    assert len(driver.runner.batches) == 6  # the prompt, four tokens, and one that nobody gets
