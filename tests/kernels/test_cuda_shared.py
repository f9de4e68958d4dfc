"""Blocks that several sequences of a batch map are read once for all of them, each at its own position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from paged_problem import (
    NO_CUDA,
    Problem,
    Span,
    Spec,
    build,
    check,
    check_extras,
    on_cuda,
    oracle,
    rows,
    same_dtype,
    to_cpu,
)

from memkv.kernels import AttentionPlan, AttentionResult, cuda, ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)]

BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
PLAIN = {"dtype": BFLOAT, "q_dtype": BFLOAT, "head_dim": 128, "group": 4}
Where = tuple[int, int]  # sequence, segment


@pytest.fixture(autouse=True)
def share_whatever_can_be() -> Iterator[None]:
    with cuda.tuned(cuda.Tuning(least_saved=1)):
        yield


def mapped(spec: Spec, same: Mapping[Where, Where]) -> Problem:
    """The problem with the blocks of some segments in the place of others' of the same length."""
    problem = build(spec)
    plan = problem.plan
    starts, segments, ids = plan.segment_start.tolist(), plan.segments.tolist(), plan.block_ids.clone()
    for (sequence, segment), (of_sequence, of_segment) in same.items():
        first, count = segments[starts[sequence] + segment][:2]
        source, expected = segments[starts[of_sequence] + of_segment][:2]
        assert count == expected
        blocks = -(-count // spec.block_size)
        ids[first : first + blocks] = ids[source : source + blocks].clone()
        problem.keys[sequence][segment] = problem.keys[of_sequence][of_segment]
        problem.values[sequence][segment] = problem.values[of_sequence][of_segment]
    names = ("query_start", "query_position", "segment_start", "segments")
    problem.plan = AttentionPlan(*(getattr(plan, name) for name in names), ids)
    return problem


def conversations(count: int, lengths: list[int], tokens: int = 1, offset: int = 30) -> Spec:
    """Sequences at different positions: some chunks, then text of their own."""
    sequences = []
    for i in range(count):
        spans = rows(lengths, start=3 * i, offset=offset + i)
        end = 3 * i + sum(lengths)
        sequences.append(([*spans, Span(5 + i, end, end)], list(range(end + 5 + i - tokens, end + 5 + i))))
    return Spec(sequences, **PLAIN)


def all_share(spec: Spec, segments: int) -> dict[Where, Where]:
    return {(i, j): (0, j) for i in range(1, len(spec.sequences)) for j in range(segments)}


def run(problem: Problem, **options: object) -> tuple[AttentionResult, int]:
    """The result, and how many segments were read together with others."""
    moved = on_cuda(problem)
    assert cuda.serves(moved.q, moved.k_cache)
    arguments = {**moved.arguments, **options}
    result = ops.paged_attention(moved.q, moved.k_cache, moved.v_cache, moved.plan, **arguments)
    return to_cpu(result), shared_segments(moved.plan)


def shared_segments(plan: AttentionPlan) -> int:
    slots = [work.slots for works in plan.derived.values() for work in works if work.slots is not None]
    return sum(int((of >= 0).sum()) for of in slots)


def check_against_oracle(problem: Problem, shared: int) -> None:
    exact = oracle(problem)
    result, found = run(problem, lse=True)
    assert found == shared
    check(result.out, problem, exact.out, same_dtype(problem))
    torch.testing.assert_close(result.lse.double(), exact.lse, rtol=1e-5, atol=1e-4)  # type: ignore[union-attr]
    result, _ = run(problem)
    check(result.out, problem, exact.out, same_dtype(problem))


CHUNKS = conversations(16, [97, 33, 64])
VARIANTS = {
    f"{head_dim}-block-{block_size}": replace(CHUNKS, head_dim=head_dim, block_size=block_size)
    for head_dim, block_size in itertools.product((64, 80, 96, 128, 256), (8, 16, 32))
} | {
    "float16": replace(CHUNKS, dtype=HALF, q_dtype=HALF),
    "three-heads": replace(CHUNKS, group=3),
    "one-head": replace(conversations(40, [97, 33, 64]), group=1, kv_heads=3),
    "two-tokens": conversations(9, [97, 33, 64], tokens=2),
    "four-tokens": conversations(8, [97, 33, 64], tokens=4),
    "two-tiles": conversations(64, [97, 33, 64]),
    "window": replace(CHUNKS, window=70),
    "softcap": replace(CHUNKS, softcap=5.0),
    "no-rope": replace(CHUNKS, rotary_dim=0),
    "partial-rotary": replace(CHUNKS, rotary_dim=32),
    "interleaved": replace(CHUNKS, interleaved=True),
    "outliers": replace(CHUNKS, inputs="outliers"),
    "one-hot": replace(CHUNKS, inputs="one_hot"),
    "long": conversations(16, [2048, 700, 33]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_at_different_positions(name: str) -> None:
    spec = VARIANTS[name]
    check_against_oracle(mapped(spec, all_share(spec, 3)), 3 * len(spec.sequences))


def test_nothing_of_their_own() -> None:
    spec = Spec([(rows([200], start=i, offset=i), [199 + i]) for i in range(20)], **PLAIN)
    check_against_oracle(mapped(spec, all_share(spec, 1)), 20)


def test_some_see_only_a_part_or_nothing() -> None:
    spec = Spec([(rows([120], start=7 * i, offset=40), [60]) for i in range(20)], **PLAIN)
    check_against_oracle(mapped(spec, all_share(spec, 1)), 20)


def test_groups_of_different_sequences() -> None:
    """Chunk 0 is everyone's, chunk 1 of the even ones, chunk 2 has one reader."""
    spec = conversations(24, [97, 33, 64])
    same = {(i, 0): (0, 0) for i in range(1, 24)} | {(i, 1): (0, 1) for i in range(2, 24, 2)}
    check_against_oracle(mapped(spec, same), 24 + 12)


def test_a_chunk_that_a_sequence_has_twice() -> None:
    spec = conversations(12, [97, 97])
    same = {(i, j): (0, 0) for i, j in itertools.product(range(12), range(2)) if (i, j) != (0, 0)}
    check_against_oracle(mapped(spec, same), 24)


def test_a_block_that_differs_is_seen() -> None:
    spec = conversations(16, [97, 33, 64])
    problem = mapped(spec, all_share(spec, 1))
    starts, segments = problem.plan.segment_start.tolist(), problem.plan.segments.tolist()
    for sequence in (3, 7):  # another block behind the same first one
        entry = segments[starts[sequence]][0] + 2
        other = segments[starts[sequence] + 2][0]
        problem.plan.block_ids[entry] = problem.plan.block_ids[other]
        for kept in (problem.keys, problem.values):
            changed = kept[sequence][0].clone()
            changed[32:48] = kept[sequence][2][:16]
            kept[sequence][0] = changed
    check_against_oracle(problem, 14)


def test_a_prefill_beside_them() -> None:
    spec = conversations(16, [97, 33, 64])
    prompt = (rows([97, 300], offset=5), list(range(200, 397)))
    spec = replace(spec, sequences=[*spec.sequences, prompt])
    same = {(i, j): (0, j) for i in range(1, 16) for j in range(3)} | {(16, 0): (0, 0)}
    check_against_oracle(mapped(spec, same), 48)


@pytest.mark.parametrize(
    ("spec", "tuning"),
    [
        (CHUNKS, cuda.Tuning()),  # too little to be worth it
        (CHUNKS, cuda.Tuning(least_saved=1, fixed_range=8)),
        (conversations(3, [97, 33, 64]), cuda.Tuning(least_saved=1)),  # too few rows
        (replace(CHUNKS, q_dtype=FLOAT), cuda.Tuning(least_saved=1)),
    ],
    ids=["little", "fixed", "few", "float32"],
)
def test_where_it_is_not_done(spec: Spec, tuning: cuda.Tuning) -> None:
    with cuda.tuned(tuning):
        check_against_oracle(mapped(spec, all_share(spec, 3)), 0)


def test_block_mass_is_each_sequence_s_own() -> None:
    spec = CHUNKS
    problem = mapped(spec, all_share(spec, 3))
    result, found = run(problem, lse=True, block_mass=True)
    assert found == 0
    check_extras(result, oracle(problem))


def test_a_hundred_runs_have_the_same_bits() -> None:
    spec = conversations(40, [97, 2048, 64])
    moved = on_cuda(mapped(spec, all_share(spec, 3)))

    def once() -> AttentionResult:
        return ops.paged_attention(
            moved.q, moved.k_cache, moved.v_cache, moved.plan, lse=True, **moved.arguments
        )

    first = once()
    assert shared_segments(moved.plan) == 120
    for _ in range(100):
        result = once()
        assert torch.equal(result.out, first.out)
        assert torch.equal(result.lse, first.lse)  # type: ignore[arg-type]


def test_one_graph_whatever_they_come_to_share() -> None:
    """Captured with all chunks shared, replayed with some, others, and none."""
    spec = conversations(16, [97, 33, 64])
    everyone = all_share(spec, 3)
    choices = [everyone, {key: of for key, of in everyone.items() if key[1] == 1}, {}, everyone]
    problems = [mapped(spec, same) for same in choices]
    live = on_cuda(problems[0])

    def step() -> AttentionResult:
        live.plan.refresh()
        return ops.paged_attention(live.q, live.k_cache, live.v_cache, live.plan, **live.arguments)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for problem, same in zip(problems, choices, strict=True):
        live.plan.block_ids.copy_(problem.plan.block_ids)
        captured.out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert shared_segments(live.plan) == 16 * len(set(same.values()))
        check(captured.out.cpu(), problem, oracle(problem).out, same_dtype(problem))
