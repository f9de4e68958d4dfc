"""Measures and their intervals, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from memkv.eval.scores import f1, rouge_l, score
from memkv.eval.statistics import bootstrap


def test_scores_of_known_distributions() -> None:
    full = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    other = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    found = score(other, full, [0, 1])
    assert found.nll_full == pytest.approx((math.log(2) - math.log(0.8)) / 2)
    assert found.dnll == pytest.approx(math.log(2) / 2)
    assert found.kl == pytest.approx((0.5 * math.log(2) + 0.25 * math.log(0.5)) / 2)
    assert found.agreement == 0.5
    assert (found.right, found.right_full) == (False, True)


def test_the_same_logits_cost_nothing() -> None:
    logits = torch.randn(5, 40)
    found = score(logits + 3.0, logits, [1, 2, 3, 4, 5])  # a shift of all logits is the same distribution
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    assert found.dnll == pytest.approx(0.0, abs=1e-6)
    assert found.agreement == 1.0


def test_words_are_compared_as_squad_does() -> None:
    assert f1("The cat sat.", ["cat sat"]) == 1.0
    assert f1("a dog", ["cat", "the DOG!"]) == 1.0
    assert f1("red blue", ["red green"]) == pytest.approx(0.5)
    assert f1("", ["cat"]) == 0.0


def test_the_longest_common_subsequence_of_words_is_rewarded() -> None:
    """The example of Lin (2004): the same words in another order are worth less."""
    gold = ["police killed the gunman"]
    assert rouge_l("Police kill the gunman.", gold) == pytest.approx(0.75)
    assert rouge_l("the gunman kill police", gold) == pytest.approx(0.5)
    assert rouge_l("the gunman, police killed", gold) == pytest.approx(0.5)
    assert rouge_l("one", ["one two three", "one"]) == 1.0
    assert rouge_l("a b", ["b a c d"]) == pytest.approx(2 * 1 / 6)
    assert rouge_l("", ["cat"]) == rouge_l("dog", ["cat"]) == rouge_l("cat", [""]) == 0.0


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    source = np.random.default_rng(5)
    covered = 0
    for _ in range(100):
        estimate = bootstrap(source.normal(0.3, 1.0, 80).tolist())
        assert estimate.low <= estimate.mean <= estimate.high
        covered += estimate.low <= 0.3 <= estimate.high
    assert 86 <= covered <= 100


def test_one_value_and_none() -> None:
    assert bootstrap([2.0]) == bootstrap([2.0, 2.0])
    with pytest.raises(ValueError, match="nothing"):
        bootstrap([])
