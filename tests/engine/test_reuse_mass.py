"""`mass`: the fewest blocks that hold a share of the attention, at most half of them."""

from __future__ import annotations

import pytest

from memkv.engine.reuse import MappedChunk, Mass, parse_policy

EXACT, FOUR, THREE = MappedChunk(40, 3, True), MappedChunk(64, 4, False), MappedChunk(40, 3, False)
LOOK = [[100.0] * 3, [5.0, 1.0, 0.0, 2.0], [1.0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("share", "fresh"),
    [
        (0.3, [[], [0], []]),
        (0.5, [[], [0], []]),
        (0.7, [[], [0, 3], []]),
        (0.71, [[], [0, 1, 3], []]),
        (0.9, [[], [0, 1, 3], [0]]),
        (1.0, [[], [0, 1, 3], [0]]),  # half of seven, rounded up
    ],
)
def test_the_fewest_blocks_that_hold_the_share(share: float, fresh: list[list[int]]) -> None:
    policy = Mass(share)
    assert policy.fresh_blocks([EXACT, FOUR, THREE], LOOK) == fresh
    assert policy.max_fresh_blocks([EXACT, FOUR, THREE]) == 4


def test_nobody_looks_at_anything() -> None:
    assert Mass().fresh_blocks([FOUR], [[0.0] * 4]) == [[]]
    assert Mass().fresh_blocks([EXACT]) == [[]]


def test_its_name() -> None:
    assert parse_policy("mass") == Mass() == parse_policy("mass:0.9")
    assert parse_policy(Mass(0.75).name) == Mass(0.75)
