"""`order`: the answer of a full prefill, over chunks in an order that an earlier prompt had."""

from __future__ import annotations

import pytest
from engine_harness import FAKE_LAYOUT
from lane_driver import Driver

from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import Exact, parse_policy
from memkv.engine.sequence import Sequence

SIZE = FAKE_LAYOUT.block_size
ORDER = parse_policy("order")


@pytest.fixture
def driver() -> Driver:
    return Driver(num_blocks=128, continuation_share=0.5)


@pytest.fixture
def chunks(driver: Driver) -> list[ChunkRef]:
    chunks = [driver.prompts.chunk(40 + index, f"c{index}") for index in range(4)]
    driver.store(*chunks)
    return chunks


def ask(driver: Driver, *chunks: ChunkRef, **changes: object) -> Sequence:
    sequence = driver.submit(*chunks, **{"policy": ORDER, **changes})
    driver.finish(sequence)  # the answer of a model that saw the whole prompt, in the order that was used
    driver.assert_idle()
    return sequence


def computed(sequence: Sequence) -> tuple[tuple[int, ...], int]:
    result = sequence.generation.result(0)
    return result.chunk_order, result.usage.prefilled_tokens


def test_without_an_earlier_prompt_the_order_stays(driver: Driver, chunks: list[ChunkRef]) -> None:
    a, b, c, _ = chunks
    assert computed(ask(driver, c, a, b)) == ((0, 1, 2), 40 + 41 + 5)


def test_the_order_of_an_earlier_prompt_is_taken_as_far_as_it_goes(
    driver: Driver, chunks: list[ChunkRef]
) -> None:
    a, b, c, d = chunks
    ask(driver, a, b, c, policy=Exact())
    assert computed(ask(driver, c, b, a, tail=7)) == ((2, 1, 0), 7)
    assert computed(ask(driver, d, b, a, tail=7)) == ((2, 1, 0), 43 + 7)
    assert computed(ask(driver, b, d, c, tail=7))[0] == (0, 1, 2)  # a was in front of them
    assert computed(ask(driver, c, b, a, tail=7, policy=Exact()))[0] == (0, 1, 2)


def test_the_order_that_leaves_least_to_compute_is_taken(driver: Driver, chunks: list[ChunkRef]) -> None:
    a, b, c, d = chunks
    ask(driver, a, b, policy=Exact())
    ask(driver, c, d, b, policy=Exact())
    assert computed(ask(driver, a, b, c, d, tail=7)) == ((2, 3, 1, 0), 40 + 7)
    ask(driver, b, a, policy=Exact())
    assert computed(ask(driver, a, b, tail=7)) == ((0, 1), 7)  # both are known: the order asked for


def test_chunks_behind_a_text_stay_behind_it(driver: Driver, chunks: list[ChunkRef]) -> None:
    a, b, c, d = chunks
    ask(driver, a, b, policy=Exact())
    text = driver.prompts.ids(20)
    assert computed(ask(driver, pieces=(b, a, text, c), tail=7)) == ((1, 0, 2), 20 + 42 + 7)
    ask(driver, c, d, policy=Exact())
    assert computed(ask(driver, pieces=(c, text, d), tail=7))[0] == (0, 1)


def test_the_same_chunk_twice(driver: Driver, chunks: list[ChunkRef]) -> None:
    a, b, *_ = chunks
    ask(driver, a, b, a, policy=Exact())
    assert computed(ask(driver, b, a, a, tail=7)) == ((1, 0, 2), 7)


def test_what_was_forgotten_orders_nothing(driver: Driver, chunks: list[ChunkRef]) -> None:
    a, b, c, _ = chunks
    ask(driver, a, b, c, policy=Exact())
    driver.lane.drop([c.input_key])
    assert computed(ask(driver, c, b, a))[0] == (0, 1, 2)


def test_off_keeps_the_order(driver: Driver, chunks: list[ChunkRef]) -> None:
    a, b, *_ = chunks
    ask(driver, a, b, policy=Exact())
    assert computed(ask(driver, b, a, reuse="off"))[0] == (0, 1)
