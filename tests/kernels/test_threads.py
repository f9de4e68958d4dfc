"""The library's threads, instruction sets and probes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from paged_problem import Spec, build, rows

from memkv.errors import ExtensionMissing, KernelArgumentError
from memkv.kernels import native, ops


def test_threads_are_set_and_bounded(threads: Callable[[int], None]) -> None:
    for count in (1, 3, 2):
        threads(count)
        assert ops.num_threads() == count
    for count in (0, -1, 1025, 2**40):
        with pytest.raises(KernelArgumentError):
            ops.set_num_threads(count)
    assert ops.num_threads() == 2


def test_callers_at_the_same_time_get_the_same_bits(threads: Callable[[int], None]) -> None:
    threads(2)
    problem = build(Spec([(rows([900]), list(range(840, 900)))], kv_heads=2))

    def attend() -> torch.Tensor:
        return ops.paged_attention(
            problem.q, problem.k_cache, problem.v_cache, problem.plan, **problem.arguments
        ).out

    expected = attend()
    found: list[torch.Tensor] = []
    callers = [threading.Thread(target=lambda: found.extend(attend() for _ in range(5))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 20
    assert all(torch.equal(out, expected) for out in found)


def test_an_unknown_instruction_set_is_refused() -> None:
    assert ops.isa() in ops.runnable_isas()
    assert ops.runnable_isas()[0] == "scalar"
    with pytest.raises(KernelArgumentError, match="scalar"):
        ops.set_isa("abacus")


def test_the_environment_names_the_instruction_set() -> None:
    report = "from memkv import _kernels; print(_kernels.isa())"
    for name in ops.runnable_isas():
        environment = {**os.environ, "MEMKV_ISA": name}
        command = [sys.executable, "-c", report]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == name


def test_calibration_keeps_one_of_the_numbers_it_tried(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: dict[int, float] = {1: 1.0, 2: 0.6, 3: 0.58, 4: 0.7, 5: 0.9}
    monkeypatch.setattr(ops, "_measure_threads", measured.__getitem__)
    assert ops.calibrate_threads(5) == 2  # 3 is faster, by less than 5 %
    assert ops.num_threads() == 2
    monkeypatch.undo()
    assert 1 <= ops.calibrate_threads(2) <= 2
    threads(1)


def test_the_probe_measures_a_bandwidth() -> None:
    assert 0.1 < ops.measure_read_bandwidth(1 << 24, passes=2) < 10_000


def test_huge_pages_are_asked_for_where_they_fit() -> None:
    assert not ops.prefer_huge_pages(torch.empty(16))
    assert not ops.prefer_huge_pages(torch.empty(64, 64).T)
    storage = torch.empty(8 << 20, dtype=torch.uint8)
    ops.prefer_huge_pages(storage)  # whether the system agrees is its own affair
    storage.zero_()


def test_without_the_extension_the_error_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_kernels", None)
    monkeypatch.setattr(native, "_why", "No module named 'memkv._kernels'", raising=False)
    problem = build(Spec([(rows([5]), [4])]))
    with pytest.raises(ExtensionMissing) as caught:
        ops.paged_attention(problem.q, problem.k_cache, problem.v_cache, problem.plan, **problem.arguments)
    assert "pip install" in caught.value.hint
    for call in (ops.num_threads, ops.isa, ops.runnable_isas, ops.measure_read_bandwidth):
        with pytest.raises(ExtensionMissing):
            call()
