"""Sampling: from logits to tokens, one row at a time, whoever the neighbours are."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch

from memkv.engine.sampler import Sampling, sample
from memkv.errors import BadRequestError


def draw(logits: torch.Tensor, sampling: Sampling, count: int, seed: int = 1) -> list[int]:
    random = Random(seed)
    return [int(sample(logits[None], [sampling], [random.random])) for _ in range(count)]


def test_greedy_takes_the_best_of_each_row() -> None:
    logits = torch.randn(5, 100, dtype=torch.bfloat16)
    greedy = [Sampling()] * 5
    assert sample(logits, greedy, [Random(0).random] * 5).tolist() == logits.argmax(dim=-1).tolist()


def test_greedy_draws_no_random_number() -> None:
    random = Random(3)
    sample(torch.randn(1, 100), [Sampling()], [random.random])
    assert random.random() == Random(3).random()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=3),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.2, top_k=4, top_p=0.7),
        Sampling(temperature=1.0, top_k=1000),
    ],
)
def test_frequencies_are_the_probabilities(sampling: Sampling) -> None:
    logits = torch.tensor([1.0, 3.0, 0.0, 2.5, -1.0, 2.0])
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    order = sorted(range(6), key=lambda token: -probabilities[token])
    kept = order[: sampling.top_k or None]
    total, inside = sum(float(probabilities[token]) for token in kept), 0.0
    nucleus = []
    for token in kept:
        nucleus.append(token)
        inside += float(probabilities[token]) / total
        if inside >= sampling.top_p:
            break
    mass = sum(float(probabilities[token]) for token in nucleus)
    count = 4000
    seen = Counter(draw(logits, sampling, count))
    assert set(seen) <= set(nucleus)
    for token in nucleus:
        expected = float(probabilities[token]) / mass
        assert abs(seen[token] / count - expected) < 4 * (expected * (1 - expected) / count) ** 0.5 + 1e-3


def test_a_tiny_top_p_and_a_tiny_temperature_are_greedy() -> None:
    logits = torch.randn(500)
    best = int(logits.argmax())
    assert set(draw(logits, Sampling(temperature=2.0, top_p=1e-9), 50)) == {best}
    assert set(draw(logits, Sampling(temperature=1e-6), 50)) == {best}
    assert set(draw(logits, Sampling(temperature=2.0, top_k=1), 50)) == {best}


def test_neighbours_change_nothing() -> None:
    logits = torch.randn(6, 300)
    samplings = [
        Sampling(temperature=1.0, seed=1),
        Sampling(),
        Sampling(temperature=0.5, top_k=7),
        Sampling(temperature=1.3, top_p=0.9),
        Sampling(temperature=2.0, top_k=100, top_p=0.5),
        Sampling(temperature=1.0),
    ]
    together = sample(logits, samplings, [Random(i).random for i in range(6)])
    for row in reversed(range(6)):
        alone = sample(logits[row : row + 1], [samplings[row]], [Random(row).random])
        assert alone.tolist() == [together[row]]


def test_of_tokens_that_are_equally_likely_neighbours_change_nothing() -> None:
    logits = torch.randint(0, 3, (4, 5000)).bfloat16()
    samplings = [Sampling(temperature=1.0, top_k=top_k, top_p=0.9) for top_k in (10, 100, 1000, 0)]
    together = sample(logits, samplings, [Random(i).random for i in range(4)])
    for row in range(4):
        alone = sample(logits[row : row + 1], [samplings[row]], [Random(row).random])
        assert int(alone) == together[row]


def test_a_seed_repeats_and_another_differs() -> None:
    logits = torch.randn(1000)
    sampling = Sampling(temperature=1.0)
    assert draw(logits, sampling, 20, seed=5) == draw(logits, sampling, 20, seed=5)
    assert draw(logits, sampling, 20, seed=5) != draw(logits, sampling, 20, seed=6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_a_row_that_is_not_finite_gives_no_token_and_spares_the_others(
    value: float, sampling: Sampling
) -> None:
    logits = torch.randn(3, 50)
    logits[1, 20] = value
    first, second, third = sample(logits, [sampling] * 3, [Random(0).random for _ in range(3)]).tolist()
    assert first >= 0 and second == -1 and third >= 0


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((50,), -torch.inf)
    logits[[7, 9]] = 1.0
    assert set(draw(logits, Sampling(temperature=2.0, top_p=0.99), 100)) == {7, 9}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", "x"),
        ("stop", ("",)),
        ("stop", ("a",) * 17),
        ("stop", "text"),
        ("stop", (1,)),
    ],
)
def test_values_out_of_range_are_refused_by_name_with_a_hint(name: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=name) as caught:
        Sampling(**{name: value})
    assert caught.value.hint
