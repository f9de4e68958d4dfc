"""copy_blocks moves whole blocks, and refuses what does not fit."""

from __future__ import annotations

import pytest
import torch
from paged_problem import Spec, build, rows

from memkv.errors import KernelArgumentError
from memkv.kernels import AttentionPlan, ops


def storage(num_blocks: int, num_bytes: int = 64) -> torch.Tensor:
    return torch.randint(0, 256, (num_blocks, num_bytes), dtype=torch.uint8)


def test_blocks_are_gathered_scattered_and_moved() -> None:
    pool, ids = storage(9), torch.tensor([8, 0, 3])
    staged = torch.zeros(5, 64, dtype=torch.uint8)
    ops.copy_blocks(pool, ids, staged, None)
    assert torch.equal(staged[:3], pool[ids])
    assert not staged[3:].any()
    other, places = storage(9), torch.tensor([2, 7, 5])
    before = other.clone()
    ops.copy_blocks(staged[:3], None, other, places)
    assert torch.equal(other[places], pool[ids])
    rest = [0, 1, 3, 4, 6, 8]
    assert torch.equal(other[rest], before[rest])
    ops.copy_blocks(pool, ids, pool, places)
    assert torch.equal(pool[places], pool[ids])
    ops.copy_blocks(pool, torch.tensor([], dtype=torch.int64), other, torch.tensor([], dtype=torch.int64))
    room = torch.zeros(9, 64, dtype=torch.uint8)
    ops.copy_blocks(pool, None, room[:4], None)  # as many as both have
    assert torch.equal(room[:4], pool[:4])
    assert not room[4:].any()


@pytest.mark.parametrize(
    ("source", "source_ids", "target", "target_ids", "words"),
    [
        (storage(3, 24), None, storage(3, 24), None, "multiples of 16"),
        (storage(3, 64), None, storage(3, 32), None, "multiples of 16"),
        (storage(3).float(), None, storage(3), None, "uint8"),
        (storage(3).T, None, storage(3), None, "contiguous"),
        (storage(3), torch.tensor([0, 1]), storage(3), torch.tensor([0]), "cannot go"),
        (storage(9), torch.arange(5), storage(3), None, "cannot go"),
        (storage(3), torch.tensor([0], dtype=torch.int32), storage(3), None, "int64"),
    ],
)
def test_what_does_not_fit_is_refused(
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    words: str,
) -> None:
    with pytest.raises(KernelArgumentError, match=words):
        ops.copy_blocks(source, source_ids, target, target_ids)


def test_a_plan_whose_tensors_changed_is_derived_again() -> None:
    problem = build(Spec([(rows([54, 33], offset=20), [86])]))
    caches = problem.k_cache, problem.v_cache
    ops.paged_attention(problem.q, *caches, problem.plan, **problem.arguments)
    segments = problem.plan.segments.clone()
    segments[1, 3] = 5  # the second segment counts as stored elsewhere
    problem.plan.segments.copy_(segments)
    problem.plan.refresh()
    found = ops.paged_attention(problem.q, *caches, problem.plan, **problem.arguments).out
    names = ("query_start", "query_position", "segment_start", "segments", "block_ids")
    fresh = AttentionPlan(*(getattr(problem.plan, name).clone() for name in names))
    assert torch.equal(found, ops.paged_attention(problem.q, *caches, fresh, **problem.arguments).out)
