"""AttentionPlan: what build() lays down, what validate() refuses, what turns() is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_problem import Spec, build, rows

from memkv.errors import KernelArgumentError
from memkv.kernels import AttentionPlan, Rotation, ops


def two_sequences() -> AttentionPlan:
    return AttentionPlan.build(
        [
            [([7, 2, 9, 4], 54, 0, 0), ([1, 8, 3, 5, 6, 0, 12], 97, 54, 31)],
            [([7, 2, 9, 4], 54, 16, 0), ([], 0, 70, 70)],
        ],
        [[146, 147, 148, 149, 150], [70]],
    )


def test_build_lays_the_integers_down() -> None:
    plan = two_sequences()
    assert plan.query_start.tolist() == [0, 5, 6]
    assert plan.segment_start.tolist() == [0, 2, 4]
    assert plan.segments.tolist() == [[0, 54, 0, 0], [4, 97, 54, 31], [11, 54, 16, 0], [15, 0, 70, 70]]
    assert plan.block_ids.tolist() == [7, 2, 9, 4, 1, 8, 3, 5, 6, 0, 12, 7, 2, 9, 4]
    assert (plan.num_seqs, plan.num_tokens, plan.num_segments, plan.num_entries) == (2, 6, 4, 15)
    plan.validate(num_blocks=13, block_size=16)


def test_build_of_nothing_is_a_plan() -> None:
    AttentionPlan.build([], []).validate(num_blocks=0, block_size=16)
    AttentionPlan.build([[], []], [[1], []]).validate(num_blocks=0, block_size=16)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([([0, 13], 20, 0, 0)], "entry 1 of block_ids, 13, names a block outside"),
        ([([-1], 1, 0, 0)], "outside the pool"),
        ([([0], 17, 0, 0)], "entries outside"),
        ([([0], -1, 0, 0)], "negative number of tokens"),
        ([([0], 1, -1, 0)], "positions outside"),
        ([([0], 2, 2**31 - 2, 0)], "positions outside"),
        ([([0], 1, 0, -5)], "stored positions outside"),
    ],
)
def test_validate_names_what_does_not_fit(table: list[tuple[list[int], int, int, int]], words: str) -> None:
    with pytest.raises(KernelArgumentError, match=words):
        AttentionPlan.build([table], [[5]]).validate(num_blocks=13, block_size=16)


def test_validate_lets_spare_entries_be_garbage() -> None:
    AttentionPlan.build([[([3, 2_147_480_000], 16, 0, 0)]], [[5]]).validate(num_blocks=4, block_size=16)
    with pytest.raises(KernelArgumentError, match="2147480000"):
        AttentionPlan.build([[([3, 2_147_480_000], 17, 0, 0)]], [[5]]).validate(num_blocks=4, block_size=16)


def test_what_fits_one_pool_is_checked_again_for_another() -> None:
    plan = two_sequences()
    plan.validate(num_blocks=13, block_size=16)
    with pytest.raises(KernelArgumentError):
        plan.validate(num_blocks=12, block_size=16)
    with pytest.raises(KernelArgumentError):
        plan.validate(num_blocks=13, block_size=8)


def test_tensors_of_another_make_are_refused() -> None:
    plan = two_sequences()
    for change in (
        {"query_start": plan.query_start.long()},
        {"segments": plan.segments[:, :3].contiguous()},
        {"segments": plan.segments.T.contiguous().T},
        {"block_ids": plan.block_ids[None]},
        {"segment_start": plan.segment_start[:-1]},
    ):
        with pytest.raises(KernelArgumentError):
            replace(plan, **change)
    for change in (
        {"query_start": torch.tensor([0, 7, 6], dtype=torch.int32)},
        {"segment_start": torch.tensor([0, 2, 3], dtype=torch.int32)},
        {"segments": plan.segments[[0, 1, 0, 3]].contiguous()},
    ):
        with pytest.raises(KernelArgumentError):
            replace(plan, **change).validate(num_blocks=13, block_size=16)


def test_turns_keep_float32_at_far_offsets() -> None:
    inv_freq = 500_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    plan = AttentionPlan.build([[([0], 1, 131_071, 0), ([1], 1, 3, 70_000), ([2], 1, 9, 9)]], [[131_071]])
    rotation = Rotation(inv_freq)
    turns = plan.turns(rotation)
    angle = np.array([-131_071, 69_997, 0], dtype=np.longdouble)[:, None] * inv_freq.numpy().astype(
        np.longdouble
    )
    np.testing.assert_allclose(turns[:, 0].numpy(), np.cos(angle).astype(float), rtol=0, atol=6e-8)
    np.testing.assert_allclose(turns[:, 1].numpy(), np.sin(angle).astype(float), rtol=0, atol=6e-8)
    assert plan.turns(rotation) is turns


def test_attention_refuses_what_does_not_fit() -> None:
    problem = build(Spec([(rows([20]), [19])]))
    good = {"rotation": None, "scale": 1.0}

    def attend(**change: object) -> None:
        arguments = {"q": problem.q, "plan": problem.plan, **good, **change}
        q, plan = arguments.pop("q"), arguments.pop("plan")
        ops.paged_attention(q, problem.k_cache, problem.v_cache, plan, **arguments)

    attend()
    for change, words in (
        ({"q": problem.q[:, :5]}, r"q is \[1, 5, 64\]"),
        ({"q": problem.q[:0]}, r"asks? for \[1,"),
        ({"q": problem.q[..., :32]}, "multiple of 2, 64"),
        ({"q": problem.q.half()}, "torch.float16"),
        ({"rotation": Rotation(torch.ones(33, dtype=torch.float64))}, "turns 66 dimensions of 64"),
        ({"window": -1}, "negative"),
        ({"softcap": -1.0}, "negative"),
        ({"softcap": float("nan")}, "negative"),
        ({"scale": float("inf")}, "finite"),
        ({"plan": AttentionPlan.build([[([99], 1, 0, 0)]], [[0]])}, "outside the pool"),
    ):
        with pytest.raises(KernelArgumentError, match=words):
            attend(**change)
    with pytest.raises(KernelArgumentError, match="float64"):
        Rotation(torch.ones(8))
