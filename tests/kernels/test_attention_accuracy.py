"""Paged attention against float64, by the acceptance of `paged_problem.check`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from paged_problem import (
    Answer,
    Attend,
    Problem,
    Span,
    Spec,
    build,
    check,
    check_extras,
    oracle,
    random_spec,
    rows,
    same_dtype,
)
from torch import Tensor

FLOAT, BFLOAT = torch.float32, torch.bfloat16

# One of each length; queries of one token, a few, many; some that see nothing, out of order, with holes.
MIXED = [
    (rows([1]), [0]),
    (rows([7], start=2), [8]),
    (rows([54, 0, 1]), [54, 3, 20, 54]),
    (rows([97], start=40, offset=33), list(range(100, 137))),
    (rows([213, 16, 54], offset=100), [282]),
    (rows([33], start=5), [4, 0, 40]),
    ([], [0, 9]),
]

CASES: dict[str, Spec] = {}

for dtype, q_dtype, block_size in itertools.product((FLOAT, BFLOAT), (FLOAT, BFLOAT), (8, 16, 32)):
    name = f"cache-{dtype}-q-{q_dtype}-block-{block_size}".replace("torch.", "")
    CASES[name] = Spec(MIXED, dtype=dtype, q_dtype=q_dtype, block_size=block_size)
for head_dim, dtype in itertools.product((16, 24, 80, 96, 128, 256), (FLOAT, BFLOAT)):
    name = f"head_dim-{head_dim}-{dtype}".replace("torch.", "")
    CASES[name] = Spec(MIXED, dtype=dtype, head_dim=head_dim)
for group in (1, 2, 4, 5, 8, 16, 17):
    CASES[f"group-{group}"] = Spec(MIXED, dtype=BFLOAT, kv_heads=1, group=group)
for window in (1, 7, 64, 5000):
    CASES[f"window-{window}"] = Spec(MIXED, window=window)
for inputs in ("outliers", "one_hot", "equal_keys", "x30"):
    CASES[f"{inputs}-float32"] = Spec(MIXED, inputs=inputs)
    CASES[f"{inputs}-bfloat16"] = Spec(MIXED, inputs=inputs, dtype=BFLOAT, q_dtype=BFLOAT)
CASES |= {
    "softcap": Spec(MIXED, softcap=5.0),
    "softcap-small-scores": Spec(MIXED, softcap=1000.0),
    "softcap-window-bfloat16": Spec(MIXED, softcap=20.0, window=30, dtype=BFLOAT, q_dtype=BFLOAT),
    "no-rope": Spec(MIXED, rotary_dim=0),
    "partial-rotary": Spec(MIXED, rotary_dim=16),
    "interleaved": Spec(MIXED, interleaved=True),
    "partial-interleaved": Spec(MIXED, interleaved=True, rotary_dim=32, dtype=BFLOAT),
    "far": Spec([([Span(97, 131_100, 29), Span(54, 40, 131_111)], [131_196, 93, 131_150])]),
    "many-segments": Spec([(rows([19] * 70, offset=11), [1329])], dtype=BFLOAT, block_size=8, kv_heads=1),
    "batch-17": Spec([(rows([length]), [length - 1]) for length in range(1, 18)], kv_heads=1),
    "batch-64": Spec([(rows([i % 9, i]), [i + i % 9]) for i in range(64)], kv_heads=1, group=1, dtype=BFLOAT),
    "decode-2048": Spec([(rows([2048]), [2047])], dtype=BFLOAT, kv_heads=1),
    "decode-7812": Spec([(rows([7812]), [7811])], kv_heads=1, dtype=BFLOAT, block_size=32),
    "decode-7812-cut": Spec([(rows([1000, 54, 6758], offset=54), [7811])], kv_heads=1, head_dim=128),
    "question-on-7812": Spec([(rows([7812]), list(range(7792, 7812)))], kv_heads=1, dtype=BFLOAT),
    "prefill-300": Spec([(rows([300]), list(range(300)))], kv_heads=1),
    "prefill-300-window": Spec([(rows([300]), list(range(300)))], kv_heads=1, window=40),
}


@cache
def solved(name: str) -> tuple[Problem, Answer, Tensor]:
    problem = build(CASES[name])
    return problem, oracle(problem), same_dtype(problem)


@pytest.mark.parametrize("name", CASES)
def test_within_twice_the_error_of_pytorch(name: str, attend: Attend) -> None:
    problem, exact, baseline = solved(name)
    result = attend(problem)
    check(result.out, problem, exact.out, baseline)
    assert result.lse is None
    assert result.block_mass is None


@pytest.mark.parametrize(
    "name",
    [
        "cache-float32-q-float32-block-16",
        "cache-bfloat16-q-bfloat16-block-8",
        "window-7",
        "softcap",
        "group-17",
        "many-segments",
        "decode-7812",
    ],
)
def test_log_sum_exp_and_block_mass(name: str, attend: Attend) -> None:
    problem, exact, baseline = solved(name)
    result = attend(problem, lse=True, block_mass=True)
    check(result.out, problem, exact.out, baseline)
    check_extras(result, exact)


@pytest.mark.parametrize("chunk", range(6))
def test_random_block_tables(chunk: int, attend: Attend) -> None:
    for seed in range(35 * chunk, 35 * (chunk + 1)):
        problem, exact, baseline = random_problem(seed)
        result = attend(problem, lse=True, block_mass=True)
        try:
            check(result.out, problem, exact.out, baseline)
            check_extras(result, exact)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {problem.spec}") from error


@cache
def random_problem(seed: int) -> tuple[Problem, Answer, Tensor]:
    problem = build(random_spec(seed))
    return problem, oracle(problem), same_dtype(problem)


def test_rows_that_see_no_key_are_zero(attend: Attend) -> None:
    problem = build(Spec([(rows([20], start=5), [4, 0, 30]), ([], [3])], window=6))
    result = attend(problem, lse=True, block_mass=True)
    assert result.lse is not None
    assert result.block_mass is not None
    assert torch.equal(result.out, torch.zeros_like(result.out))
    assert torch.equal(result.lse, torch.full_like(result.lse, -torch.inf))
    assert torch.equal(result.block_mass, torch.zeros_like(result.block_mass))


def test_block_mass_of_a_row_sums_to_one(attend: Attend) -> None:
    problem, _, _ = solved("decode-7812-cut")
    result = attend(problem, block_mass=True)
    assert result.block_mass is not None
    torch.testing.assert_close(result.block_mass.sum(1), torch.ones(3), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "change", [{"rotary_dim": 62}, {"interleaved": True}, {"window": 96}, {"softcap": 30.0}]
)
def test_the_acceptance_tells_another_attention_apart(change: dict[str, object]) -> None:
    spec = Spec([(rows([97], start=40, offset=33), list(range(100, 137)))], dtype=BFLOAT, q_dtype=BFLOAT)
    problem = build(spec)
    other = oracle(build(replace(spec, **change))).out.to(BFLOAT)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        check(other, problem, oracle(problem).out, same_dtype(problem))
