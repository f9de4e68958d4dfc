"""Every implementation of the kernels behind one fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from paged_problem import NO_CUDA, Attend, Problem, on_cuda, to_cpu

from memkv.kernels import AttentionResult, cuda, ops, reference

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)])
COMPILED = [*ops.runnable_isas(), CUDA]
IMPLEMENTATIONS = ["reference", *COMPILED]


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Problems this small gain nothing from torch's threads, and lose much where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request: pytest.FixtureRequest) -> Iterator[Attend]:
    """attend(problem, **options): the problem's attention by one implementation."""
    yield from _attend(request.param)


@pytest.fixture(params=COMPILED)
def attend_compiled(request: pytest.FixtureRequest) -> Iterator[Attend]:
    """The same of the compiled implementations only."""
    yield from _attend(request.param)


def _attend(implementation: str) -> Iterator[Attend]:
    before = ops.isa()
    if implementation not in ("reference", "cuda"):
        ops.set_isa(implementation)
    run = reference.paged_attention if implementation == "reference" else ops.paged_attention

    def attend(problem: Problem, **options: object) -> AttentionResult:
        if implementation == "cuda":
            problem = on_cuda(problem)
            if not cuda.serves(problem.q, problem.k_cache):
                pytest.skip("the reference serves it on a GPU")
        arguments = {**problem.arguments, **options}
        result = run(problem.q, problem.k_cache, problem.v_cache, problem.plan, **arguments)
        return to_cpu(result) if implementation == "cuda" else result

    yield attend
    ops.set_isa(before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for one test."""
    before = ops.num_threads()
    yield ops.set_num_threads
    ops.set_num_threads(before)
