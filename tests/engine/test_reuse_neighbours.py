"""`neighbours`: chunks that stand behind each other in their document and in the prompt have no seam."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lane_driver import SIZE, Driver

from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import MappedChunk, ReusePolicy, parse_policy
from memkv.errors import BadRequestError


def test_heads_but_where_a_chunk_follows() -> None:
    mapped = [
        MappedChunk(40, 3, True),
        MappedChunk(40, 3, False, follows=True),
        MappedChunk(40, 3, False),
        MappedChunk(40, 3, True, follows=True),
    ]
    policy = parse_policy("neighbours:2")
    assert policy.fresh_blocks(mapped) == [[], [], [0, 1], []]
    assert policy.max_fresh_blocks(mapped) == 2
    assert parse_policy("neighbours") == parse_policy("neighbours:1") == parse_policy(policy.name[:-1] + "1")
    with pytest.raises(BadRequestError):
        parse_policy("neighbours:0")


@pytest.fixture
def chapters() -> tuple[Driver, list[ChunkRef]]:
    """Three chunks of one document, in its order."""
    driver = Driver(num_blocks=128)
    plain = [driver.prompts.chunk(40, f"c{index}") for index in range(3)]
    driver.store(*plain)
    befores = ("", *(ref.input_key for ref in plain))
    return driver, [replace(ref, after=before) for ref, before in zip(plain, befores, strict=False)]


def prefilled(driver: Driver, *pieces: ChunkRef | tuple[int, ...]) -> int:
    policy: ReusePolicy = parse_policy("neighbours")
    sequence = driver.submit(pieces=pieces, policy=policy, tail=7, reuse="auto")
    driver.run()
    return sequence.generation.result(0).usage.prefilled_tokens - 7


def test_only_the_prompts_own_order_counts(chapters: tuple[Driver, list[ChunkRef]]) -> None:
    driver, (a, b, c) = chapters
    assert prefilled(driver, a, b, c) == 0
    assert prefilled(driver, b, a, c) == 2 * SIZE
    assert prefilled(driver, c, a, b) == SIZE
    assert prefilled(driver, a, c, b) == 2 * SIZE


def test_a_text_between_them_is_a_seam(chapters: tuple[Driver, list[ChunkRef]]) -> None:
    driver, (a, b, _) = chapters
    assert prefilled(driver, a, driver.prompts.ids(9), b) == 9 + SIZE


def test_a_ref_is_the_same_chunk_whatever_stands_before_it(chapters: tuple[Driver, list[ChunkRef]]) -> None:
    driver, (a, b, _) = chapters
    assert replace(b, after="") == b and hash(replace(b, after="")) == hash(b)
    prefilled(driver, a, b)
    reads = len(driver.source.reads)
    assert prefilled(driver, a, replace(b, after="")) == SIZE
    assert len(driver.source.reads) == reads
    driver.assert_idle()
