"""Policies are found by their files, and each is written as it says."""

from __future__ import annotations

import pkgutil

import pytest

import memkv.engine.reuse as package
from memkv.engine.reuse import (
    Exact,
    Head,
    LookRequest,
    Map,
    MappedChunk,
    ReusePolicy,
    parse_policy,
    policy_names,
)
from memkv.errors import BadRequestError

CHUNKS = [MappedChunk(40, 3, True), MappedChunk(50, 4, False), MappedChunk(16, 1, False)]


def test_every_policy_file_is_found() -> None:
    files = {module.name for module in pkgutil.iter_modules(package.__path__)} - {"parsing", "policy"}
    assert {name.partition(":")[0] for name in policy_names()} == files
    for name in files:
        parse_policy(name)


@pytest.mark.parametrize(
    ("text", "policy"),
    [("exact", Exact()), ("map", Map()), ("head", Head(1)), ("head:1", Head(1)), ("head:12", Head(12))],
)
def test_policies_have_names(text: str, policy: ReusePolicy) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(policy.name) == policy


@pytest.mark.parametrize(
    "text",
    ["", "Exact", "exact:1", "map:", "head:", "head:0", "head:-1", "head:x", "head:1:2", "head:²", "policy"],
)
def test_other_names_are_refused_with_a_hint(text: str) -> None:
    with pytest.raises(BadRequestError, match="head:n"):
        parse_policy(text)


@pytest.mark.parametrize(
    ("policy", "fresh"),
    [
        (Exact(), [[], [0, 1, 2, 3], [0]]),
        (Map(), [[], [], []]),
        (Head(1), [[], [0], [0]]),
        (Head(2), [[], [0, 1], [0]]),
    ],
)
def test_what_is_fresh(policy: ReusePolicy, fresh: list[list[int]]) -> None:
    assert policy.look is None
    assert policy.fresh_blocks(CHUNKS) == fresh
    assert policy.max_fresh_blocks(CHUNKS) == sum(map(len, fresh))


@pytest.mark.parametrize(
    ("layers", "num_layers", "indices"),
    [
        ((2 / 3, 1.0), 30, range(20, 30)),
        ((0.0, 1.0), 5, range(5)),
        ((0.0, 1 / 6), 2, range(1)),
        ((0.5, 0.5), 4, range(2, 3)),
        ((1.0, 1.0), 4, range(3, 4)),
    ],
)
def test_a_look_names_its_layers(layers: tuple[float, float], num_layers: int, indices: range) -> None:
    assert LookRequest(layers).layer_indices(num_layers) == indices


@pytest.mark.parametrize("name", [name.partition(":")[0] for name in policy_names()])
def test_a_policy_that_maps_nothing_of_other_contexts_says_so(name: str) -> None:
    policy = parse_policy(name)
    exact, *others = CHUNKS
    maps = policy.look is not None or any(
        len(fresh) < chunk.num_blocks
        for chunk, fresh in zip(CHUNKS, policy.fresh_blocks(CHUNKS), strict=True)
        if chunk in others
    )
    assert policy.maps_other_contexts == maps
    if policy.look is None:
        assert policy.fresh_blocks([exact]) == [[]]
