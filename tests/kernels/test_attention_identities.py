"""What must hold whatever the numbers: poison stays out, identities hold, bits repeat."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from paged_problem import Attend, Problem, Spec, build, fill, poisoned_pool, rows
from torch import Tensor

from memkv.kernels import AttentionPlan, ops, reference

BFLOAT = torch.bfloat16

# A decode step whose context is cut into ranges, and rows enough for the other loop.
DECODE = Spec([(rows([3000, 54, 1900], offset=40), [4953])], kv_heads=2, dtype=BFLOAT)
PREFILL = Spec([(rows([97, 54, 33], offset=10), list(range(100, 184)))], kv_heads=2, dtype=BFLOAT)
BOTH = pytest.mark.parametrize("spec", [DECODE, PREFILL], ids=["decode", "prefill"])
Table = list[tuple[Sequence[int], int, int, int]]


def table_of(problem: Problem) -> Table:
    """The problem's only sequence as segments, its garbage entries left out."""
    ids, block_size = problem.plan.block_ids.tolist(), problem.spec.block_size
    return [
        (ids[first : first - (-num_tokens // block_size)], num_tokens, position, stored)
        for first, num_tokens, position, stored in problem.plan.segments.tolist()
    ]


def with_table(problem: Problem, table: Table) -> Problem:
    positions = [problem.plan.query_position.tolist()]
    return replace(problem, plan=AttentionPlan.build([table], positions))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT])
def test_values_of_one_give_exactly_one(spec: Spec, dtype: torch.dtype, attend_compiled: Attend) -> None:
    problem = build(replace(spec, dtype=dtype, inputs="outliers"))
    problem.v_cache[~problem.v_cache.isnan()] = 1.0
    out = attend_compiled(problem).out
    assert torch.equal(out, torch.ones_like(out))


@BOTH
def test_shuffled_segments_give_the_same(spec: Spec, attend: Attend) -> None:
    problem = build(spec)
    table = table_of(problem)
    random.Random(1).shuffle(table)
    found = attend(with_table(problem, table)).out
    torch.testing.assert_close(found, attend(problem).out, rtol=0, atol=2e-6)


@BOTH
def test_a_segment_cut_in_two_equals_one(spec: Spec, attend: Attend) -> None:
    problem = build(spec)
    (blocks, num_tokens, position, stored), *rest = table_of(problem)
    cut = 3 * problem.spec.block_size
    table = [
        (blocks[:3], cut, position, stored),
        (blocks[3:], num_tokens - cut, position + cut, stored + cut),
        *rest,
    ]
    found = attend(with_table(problem, table)).out
    torch.testing.assert_close(found, attend(problem).out, rtol=0, atol=2e-6)


@BOTH
def test_empty_segments_and_spare_entries_change_no_bit(spec: Spec, attend: Attend) -> None:
    problem = build(spec)
    table = table_of(problem)
    spare = 2_147_480_000
    padded = [
        ([], 0, 7, 7),
        *(([*blocks, spare, -1], n, p, s) for blocks, n, p, s in table),
        ([spare], 0, 0, 0),
    ]
    assert torch.equal(attend(with_table(problem, padded)).out, attend(with_table(problem, table)).out)


def test_one_block_at_two_offsets_equals_two_copies(attend: Attend) -> None:
    spec = Spec([(rows([54, 54], offset=30), [107, 80])])
    problem = build(spec)
    (first, num_tokens, position, stored), (second, _, later, _) = table_of(problem)
    fill(problem.k_cache, problem.v_cache, second, problem.keys[0][0], problem.values[0][0])
    copies: Table = [(first, num_tokens, position, stored), (second, num_tokens, later, stored)]
    shared: Table = [(first, num_tokens, position, stored), (first, num_tokens, later, stored)]
    assert torch.equal(attend(with_table(problem, shared)).out, attend(with_table(problem, copies)).out)


def test_without_rope_only_the_order_of_positions_counts(attend: Attend) -> None:
    problem = build(replace(PREFILL, rotary_dim=0))
    moved = [(blocks, n, p + 1000, s) for blocks, n, p, s in table_of(problem)]
    positions = [(problem.plan.query_position + 1000).tolist()]
    later = replace(problem, plan=AttentionPlan.build([moved], positions))
    assert torch.equal(attend(later).out, attend(problem).out)


@BOTH
def test_a_run_repeated_is_equal_to_the_bit(spec: Spec, attend: Attend) -> None:
    problem = build(spec)
    first, second = (attend(problem, lse=True, block_mass=True) for _ in range(2))
    for name in ("out", "lse", "block_mass"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@BOTH
def test_the_number_of_threads_changes_no_bit(
    spec: Spec, attend_compiled: Attend, threads: Callable[[int], None]
) -> None:
    problem = build(spec)
    found = []
    for count in (1, 2, 3, 7):
        threads(count)
        found.append(attend_compiled(problem, lse=True, block_mass=True))
    for result in found[1:]:
        assert torch.equal(result.out, found[0].out)
        assert torch.equal(result.block_mass, found[0].block_mass)  # type: ignore[arg-type]


def test_the_rest_of_the_batch_changes_no_bit(attend_compiled: Attend) -> None:
    alone = [DECODE.sequences[0], PREFILL.sequences[0], (rows([9]), [8])]
    problem = build(Spec(alone, dtype=BFLOAT, head_dim=32))
    together = attend_compiled(problem).out
    row = 0
    for sequence, (spans, positions) in enumerate(alone):
        segments = problem.plan.segments[problem.plan.segment_start[sequence] :][: len(spans)].tolist()
        ids = problem.plan.block_ids.tolist()
        table = [(ids[first : first + -(-n // 16)], n, p, s) for first, n, p, s in segments]
        mine = slice(row, row + len(positions))
        one = replace(problem, q=problem.q[mine], plan=AttentionPlan.build([table], [positions]))
        assert torch.equal(attend_compiled(one).out, together[mine])
        row = mine.stop


def test_the_output_is_written_whole(monkeypatch: pytest.MonkeyPatch, attend_compiled: Attend) -> None:
    def poisoned(*shape: object, **options: object) -> Tensor:
        return torch.full(shape[0], torch.nan, **options)  # type: ignore[call-overload,no-any-return]

    problem = build(Spec([(rows([20]), [19, 0]), ([], [3]), (rows([5], start=8), [2])]))
    monkeypatch.setattr(ops.torch, "empty", poisoned)
    result = attend_compiled(problem, lse=True)
    assert not result.out.isnan().any()
    assert not result.lse.isnan().any()  # type: ignore[union-attr]


def test_the_poison_is_there(attend: Attend) -> None:
    """A negative control: one token more than was written, and the answer is NaN."""
    problem = build(Spec([(rows([20]), [30])]))
    (blocks, num_tokens, position, stored) = table_of(problem)[0]
    assert not attend(problem).out.isnan().any()
    assert attend(with_table(problem, [(blocks, num_tokens + 1, position, stored)])).out.isnan().any()


def test_strided_queries_are_taken_as_they_are(attend: Attend) -> None:
    problem = build(PREFILL)
    expected = attend(problem).out
    strided = problem.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(attend(replace(problem, q=strided)).out, expected)
    scattered = problem.q.mT.contiguous().mT
    assert scattered.stride(-1) != 1
    assert torch.equal(attend(replace(problem, q=scattered)).out, expected)


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_block_ids_whose_offset_passes_2_to_the_31(implementation: str) -> None:
    """6 GiB of address space, a few pages of memory: offsets pass 2**31 in bytes and in elements."""
    spec = Spec([], dtype=BFLOAT)
    near_k, near_v = poisoned_pool(spec, 4)
    block_elements = 2 * near_k[0].numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    pool = torch.frombuffer(mmap.mmap(-1, 6 << 30, flags=flags), dtype=BFLOAT)
    num_blocks = pool.numel() // block_elements
    pool = pool[: num_blocks * block_elements].view(num_blocks, 2, -1)
    far_k = pool[:, 0].view(num_blocks, *near_k.shape[1:])
    far_v = pool[:, 1].view(num_blocks, *near_v.shape[1:])
    assert (num_blocks - 1) * block_elements > 2**31

    run = reference if implementation == "reference" else ops
    k, v = torch.randn(2, 40, spec.kv_heads, spec.head_dim).unbind()
    q = torch.randn(1, 6, spec.head_dim)
    results = []
    for k_cache, v_cache, blocks in (
        (near_k, near_v, [0, 2, 1]),
        (far_k, far_v, [num_blocks - 1, num_blocks // 2 + 7, num_blocks - 2]),
    ):
        slots = torch.tensor([blocks[token // 16] * 16 + token % 16 for token in range(40)])
        run.write_kv(k, v, k_cache, v_cache, slots)
        plan = AttentionPlan.build([[(blocks, 40, 0, 0)]], [[39]])
        results.append(run.paged_attention(q, k_cache, v_cache, plan, rotation=None, scale=0.1).out)
    assert torch.equal(*results)
