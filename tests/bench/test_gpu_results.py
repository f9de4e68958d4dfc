"""The kept figures of the CUDA kernels are of these sources, or say why not; and the bench runs on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sources import engine_digest, kernel_digest

from memkv.bench.kernel import run_kernel_bench
from memkv.bench.kernel_pool import Heads, Sizes
from memkv.errors import KernelArgumentError

RESULTS = Path(__file__).with_name("results")
KERNEL, ENGINE = (sorted(RESULTS.glob(f"{kind}-*.json")) for kind in ("kernel", "engine"))
SHAPES = ["1x4096", "1x32768", "1x131072", "8x8192", "32x4096", "64x8192"]


def kept(path: Path, digest: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["gpu"]
    assert found["versions"]["torch"]
    assert len(found["source_hash"]) == 64
    assert found["source_hash"] == digest or found["stale_reason"], (
        "the sources changed since they were measured: measure again, or give a stale_reason"
    )
    return found


@pytest.mark.parametrize("path", KERNEL, ids=lambda path: path.stem)
def test_kept_figures_of_kernels_are_of_these_sources_or_say_why_not(path: Path) -> None:
    found = kept(path, kernel_digest())
    shapes = [row["shape"] for row in found["rows"] if row["heads"] == "32/8/128"]
    assert shapes == SHAPES
    for row in found["rows"]:
        assert row["ours_us"] > 0
        assert row["ours_unrotated_us"] > 0
        assert {"cudnn_contiguous", "flash_contiguous"} <= row["peers_us"].keys()
        assert row["read_tbs"] <= found["read_ceiling_tbs"]


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.stem)
def test_kept_figures_of_engines_are_of_these_sources_or_say_why_not(path: Path) -> None:
    found = kept(path, engine_digest())
    full = {row["context"]: row["ms"] for row in found["ttft"] if row["policy"] == "off"}
    assert {row["context"] for row in found["ttft"]} == full.keys()
    for row in found["ttft"]:
        assert row["ms"] > 0 and row["full_prefill_ms"] == full[row["context"]]
    assert all(row["ms"] > row["floor_ms"] > 0 for row in found["decode"])
    assert found["host_load_gbs"] > 0 and found["ingest_tokens_per_s"] > 0


def test_the_bench_runs_on_a_cpu() -> None:
    shapes, others = ((1, 256), (2, 64)), (Heads(9, 3, 64),)
    sizes = Sizes(1 << 22, 2, shapes, replays=1, many_queries=False, other_heads=others)
    found = run_kernel_bench("cpu", sizes=sizes)
    assert [row.shape for row in found.rows] == ["1x256", "2x64", "2x64"]
    assert [row.heads for row in found.rows] == ["32/8/128", "32/8/128", "9/3/64"]
    assert all(row.ours_us > 0 and row.peers_us["sdpa_contiguous"] > 0 for row in found.rows)
    assert set(found.block_sizes["1x256"]) == {"8", "16", "32"}
    assert found.read_ceiling_tbs > 0


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(KernelArgumentError, match="no CUDA device"):
        run_kernel_bench("cuda")
