"""What an engine takes where nobody says how much."""

from __future__ import annotations

import pytest
import torch

from memkv.config import EngineConfig
from memkv.engine.limits import pool_bytes

FREE = {"cuda:0": 50_000_000_000, "cuda:1": 20_000_000_000}


@pytest.mark.parametrize(
    ("asked", "devices", "expected"),
    [
        (0, ["cpu"], 2_000_000_000),
        (0, ["cpu", "cpu"], 2_000_000_000),
        (7, ["cuda:0"], 7),
        (0, ["cuda:0"], 40_000_000_000),
        (0, ["cuda:0", "cuda:1"], 16_000_000_000),
        (0, ["cuda:0", "cuda:0", "cuda:1"], 16_000_000_000),
        (0, ["cuda:0", "cuda:0", "cuda:0"], 13_333_333_333),
    ],
)
def test_the_pool_is_most_of_what_the_fullest_gpu_has_left(
    asked: int, devices: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE[device], 80_000_000_000))
    assert pool_bytes(EngineConfig(pool_bytes=asked), devices) == expected
