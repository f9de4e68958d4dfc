"""Whose turn it is: equal time for each kind of work, steps of a bounded length."""

from __future__ import annotations

from collections import Counter

import torch

from memkv.engine.fair_share import FairShare
from memkv.engine.pace import Pace
from memkv.engine.threads import Threads, use_threads
from memkv.kernels import ops


def test_kinds_of_work_get_equal_time() -> None:
    share: FairShare[str] = FairShare()
    seconds = {"generation": 0.02, "fill": 0.15}
    used: Counter[str] = Counter()
    for _ in range(1000):
        kind = share.choose(["generation", "fill"])
        share.charge(kind, seconds[kind])
        used[kind] += 1
    assert abs(used["generation"] * 0.02 - used["fill"] * 0.15) < 0.2


def test_who_comes_late_goes_first_but_saves_nothing_up() -> None:
    share: FairShare[str] = FairShare()
    for _ in range(100):
        assert share.choose(["fill"]) == "fill"
        share.charge("fill", 1.0)
    turns = []
    for _ in range(6):
        kind = share.choose(["generation", "fill"])
        share.charge(kind, 1.0)
        turns.append(kind)
    assert turns[0] == "generation"
    assert turns.count("fill") == 3


def test_nobody_who_pauses_is_owed_for_the_pause() -> None:
    share: FairShare[str] = FairShare()
    share.charge(share.choose(["a", "b"]), 1.0)  # a
    for _ in range(50):
        share.charge(share.choose(["a"]), 1.0)
    turns = []
    for _ in range(8):
        kind = share.choose(["a", "b"])
        share.charge(kind, 1.0)
        turns.append(kind)
    assert turns.count("b") <= 5


def test_a_step_takes_about_as_long_as_asked() -> None:
    pace = Pace()
    assert pace.tokens_for(1.0) == 256  # nothing measured yet
    for _ in range(30):
        pace.observe(500, 0.5)
    assert 950 <= pace.tokens_for(1.0) <= 1000
    assert 475 <= pace.tokens_for(0.5) <= 500


def test_a_slow_step_does_not_shrink_the_next_ones_without_end() -> None:
    pace = Pace()
    for _ in range(100):  # a step takes a tenth of a second however small it is
        tokens = pace.tokens_for(0.05)
        pace.observe(tokens, 0.1)
    assert tokens == 128


def test_threads_are_set_for_torch_and_the_kernels() -> None:
    before, kernels_before = torch.get_num_threads(), ops.num_threads()
    try:
        assert use_threads(1, 64) == Threads(1, 1)
        assert (torch.get_num_threads(), ops.num_threads()) == (1, 1)
        torch.set_num_threads(2)
        measured = use_threads(0, 64)
        assert measured.torch in (1, 2) and measured.kernels in (1, 2)
        assert measured == Threads(torch.get_num_threads(), ops.num_threads())
    finally:
        torch.set_num_threads(before)
        ops.set_num_threads(kernels_before)
