"""What an engine takes where nobody says how much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memkv.config import EngineConfig
from memkv.engine import limits
from memkv.engine.limits import free_memory, host_bytes, pool_bytes

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


@pytest.mark.parametrize(
    ("changes", "free", "devices", "expected"),
    [
        ({}, 60 << 30, ["cpu"], 0),
        ({"host_bytes": 7}, 60 << 30, ["cpu"], 7),
        ({"host_bytes": 7}, 60 << 30, ["cuda:0", "cuda:1"], 7),
        ({}, 60 << 30, ["cuda:0"], 8 << 30),
        ({}, 500 << 30, ["cuda:0"], 16 << 30),
        ({}, 500 << 30, ["cuda:0", "cuda:0", "cuda:1"], 4 << 30),
        ({"host_share": 0.0}, 60 << 30, ["cuda:0"], 0),
        ({}, 0, ["cuda:0"], 0),
    ],
)
def test_host_memory_is_taken_for_gpus_alone(
    changes: dict[str, float], free: int, devices: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "free_memory", lambda: free)
    assert host_bytes(EngineConfig(**changes), devices) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "expected"), [(None, 2048), ("max\n", 2048), ("1500\n", 1500)])
def test_free_is_what_a_container_may_use(tmp_path: Path, limit: str | None, expected: int) -> None:
    assert free_memory(tmp_path) == 0
    for name, text in {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2 kB\n",
        "sys/fs/cgroup/memory.max": limit,
    }.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == expected
