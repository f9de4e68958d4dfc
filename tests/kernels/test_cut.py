"""How the work of few rows is cut where units divide evenly among a GPU's processors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memkv.kernels import cuda

FITS: Any = SimpleNamespace(workers=264, warps=8)


@pytest.mark.parametrize(
    ("units", "head_dim", "expected"),
    [
        (8, 128, 128),  # 16 parts of each
        (64, 128, 128),
        (132, 128, 132),
        (24, 128, 264),  # 11 parts of each; 5 would leave 12 processors without
        (256, 128, 256),
        (512, 128, 512),
        (40, 128, 0),
        (320, 128, 0),
        (3, 64, 264),
        (60, 64, 240),
        (8, 256, 128),
    ],
)
def test_whole_ranges_leave_few_workers_without(units: int, head_dim: int, expected: int) -> None:
    assert cuda._few_whole_ranges(units, 132, FITS, head_dim, 10_000) == expected


def test_two_ranges_for_each_worker_are_for_long_contexts_only() -> None:
    assert cuda._few_whole_ranges(3, 132, FITS, 64, 1000) == 132
    assert cuda._few_whole_ranges(24, 132, FITS, 128, 1000) == 0


def test_one_block_of_threads_on_a_processor_has_one_range() -> None:
    assert cuda._few_whole_ranges(24, 132, SimpleNamespace(workers=132, warps=4), 128, 10_000) == 0  # type: ignore[arg-type]
