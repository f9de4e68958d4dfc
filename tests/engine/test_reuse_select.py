"""`select`: what is looked at most, within its budget; head blocks first where that is asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv.engine.reuse import LookRequest, MappedChunk, Select, parse_policy
from memkv.errors import BadRequestError

EXACT, FOUR, SIX = MappedChunk(40, 3, True), MappedChunk(64, 4, False), MappedChunk(90, 6, False)


def test_the_budget_is_a_fraction_of_the_blocks_whose_context_differs() -> None:
    look = [[9.0] * 3, [0.1, 3.0, 0.2, 0.3], [0.0, 0.5, 2.0, 0.4, 2.0, 1.0]]
    chosen = {
        0.1: [[], [0], [0]],  # a block of ten: the two heads are more
        0.2: [[], [0], [0]],
        0.3: [[], [0, 1], [0]],
        0.4: [[], [0, 1], [0, 2]],  # of equals the first
        0.5: [[], [0, 1], [0, 2, 4]],
        1.0: [[], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]],
    }
    for fraction, fresh in chosen.items():
        policy = Select(fraction, heads=True)
        assert policy.fresh_blocks([EXACT, FOUR, SIX], look) == fresh
        assert policy.max_fresh_blocks([EXACT, FOUR, SIX]) == sum(map(len, fresh))


def test_without_heads_the_look_alone_chooses() -> None:
    look = [[0.1, 3.0, 0.2, 0.3], [0.0, 0.5, 2.0, 0.4, 2.0, 1.0]]
    assert Select(0.2).fresh_blocks([FOUR, SIX], look) == [[1], [2]]


def test_rounding_buys_no_block() -> None:
    assert Select(0.07).max_fresh_blocks([MappedChunk(1600, 100, False)]) == 7


def test_nothing_is_chosen_where_everything_is_exact() -> None:
    assert Select().max_fresh_blocks([EXACT]) == 0
    assert Select().fresh_blocks([EXACT]) == [[]]
    assert Select().fresh_blocks([]) == []


@given(
    fraction=st.floats(0.001, 1.0),
    chunks=st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=8),
    heads=st.booleans(),
    data=st.data(),
)
def test_no_look_makes_it_choose_more_than_it_says(
    fraction: float, chunks: list[tuple[int, bool]], heads: bool, data: st.DataObject
) -> None:
    mapped = [MappedChunk(tokens, math.ceil(tokens / 16), exact) for tokens, exact in chunks]
    masses = st.floats(0, 100)
    look = [data.draw(st.lists(masses, min_size=c.num_blocks, max_size=c.num_blocks)) for c in mapped]
    policy = Select(fraction, heads=heads)
    fresh = policy.fresh_blocks(mapped, look)
    assert sum(map(len, fresh)) == policy.max_fresh_blocks(mapped)
    for chunk, blocks in zip(mapped, fresh, strict=True):
        assert blocks == sorted(set(blocks)) and set(blocks) <= set(range(chunk.num_blocks))
        assert not (chunk.context_exact and blocks)
        assert not heads or (0 in blocks) is not chunk.context_exact


@pytest.mark.parametrize(
    ("text", "fraction"), [("select", 0.15), ("select:0.15", 0.15), ("select:1", 1.0), ("select:.05", 0.05)]
)
def test_its_name(text: str, fraction: float) -> None:
    policy: Any = parse_policy(text)
    assert policy == Select(fraction) == parse_policy(policy.name)
    assert policy.look == LookRequest((2 / 3, 1.0), 0)
    assert Select(0.1, (0.0, 0.5), 4, heads=True).name == "select:0.1[layers 0-0.5, last 4, heads]"


@pytest.mark.parametrize("text", ["select:", "select:0", "select:1.1", "select:1e-1", "select:x"])
def test_other_fractions_are_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="select:r"):
        parse_policy(text)
