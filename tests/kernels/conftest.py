"""Every implementation of the kernels behind one fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from paged_problem import Attend, Problem

from memkv.kernels import AttentionResult, ops, reference

IMPLEMENTATIONS = ["reference", *ops.runnable_isas()]


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Problems this small gain nothing from torch's threads, and lose much where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request: pytest.FixtureRequest) -> Iterator[Attend]:
    """attend(problem, **options): the problem's attention by one implementation; `.name` says which."""
    compiled = request.param != "reference"
    before = ops.isa()
    if compiled:
        ops.set_isa(request.param)
    run = ops.paged_attention if compiled else reference.paged_attention

    def attend(problem: Problem, **options: object) -> AttentionResult:
        arguments = {**problem.arguments, **options}
        return run(problem.q, problem.k_cache, problem.v_cache, problem.plan, **arguments)

    yield attend
    ops.set_isa(before)


@pytest.fixture(params=ops.runnable_isas())
def attend_compiled(request: pytest.FixtureRequest) -> Iterator[Attend]:
    """The same of the compiled implementations only."""
    before = ops.isa()
    ops.set_isa(request.param)

    def attend(problem: Problem, **options: object) -> AttentionResult:
        arguments = {**problem.arguments, **options}
        return ops.paged_attention(problem.q, problem.k_cache, problem.v_cache, problem.plan, **arguments)

    yield attend
    ops.set_isa(before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for one test."""
    before = ops.num_threads()
    yield ops.set_num_threads
    ops.set_num_threads(before)
