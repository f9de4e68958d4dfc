"""The CUDA kernels: every shape they promise, in the dtypes they serve; graphs, slots, blocks, determinism.

What all implementations share is in the other files, where they run on a GPU as well.
"""

from __future__ import annotations

import itertools
import random
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
    fill,
    on_cuda,
    oracle,
    poisoned_pool,
    random_spec,
    rows,
    same_dtype,
    to_cpu,
)
from test_attention_accuracy import MIXED
from torch import Tensor

from memkv.kernels import AttentionPlan, AttentionResult, cuda, ops, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)]

BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
HEAD_DIMS = (64, 80, 96, 128, 256)
LENGTHS = (1, 7, 54, 97, 213, 2048, 7812)

CASES: dict[str, Spec] = {}
for head_dim, block_size, dtype in itertools.product(HEAD_DIMS, (8, 16, 32), (BFLOAT, HALF)):
    name = f"{head_dim}-block-{block_size}-{dtype}".replace("torch.", "")
    CASES[name] = Spec(MIXED, dtype=dtype, q_dtype=dtype, head_dim=head_dim, block_size=block_size)
for head_dim, group in itertools.product(HEAD_DIMS, (1, 2, 4, 5, 7, 8, 16, 17)):
    CASES[f"{head_dim}-group-{group}"] = Spec(
        MIXED, dtype=BFLOAT, q_dtype=BFLOAT, head_dim=head_dim, kv_heads=1, group=group
    )
for q_dtype, dtype in ((FLOAT, BFLOAT), (FLOAT, HALF), (HALF, BFLOAT), (BFLOAT, HALF)):
    for head_dim in HEAD_DIMS:
        name = f"{head_dim}-q-{q_dtype}-cache-{dtype}".replace("torch.", "")
        CASES[name] = Spec(MIXED, dtype=dtype, q_dtype=q_dtype, head_dim=head_dim)
for dtype, inputs in itertools.product((BFLOAT, HALF), ("outliers", "one_hot", "equal_keys", "x30")):
    name = f"{inputs}-{dtype}".replace("torch.", "")
    CASES[name] = Spec(MIXED, dtype=dtype, q_dtype=dtype, inputs=inputs, head_dim=128)
for window, dtype in itertools.product((1, 7, 64, 5000), (BFLOAT, HALF)):
    name = f"window-{window}-{dtype}".replace("torch.", "")
    CASES[name] = Spec(MIXED, dtype=dtype, q_dtype=dtype, window=window, block_size=32)
for batch, length in itertools.product((1, 7, 17, 64), LENGTHS):
    if batch * length <= 20_000:
        spans = [(rows([length], offset=i), [length - 1]) for i in range(batch)]
        CASES[f"decode-{batch}x{length}"] = Spec(
            spans, dtype=BFLOAT, q_dtype=BFLOAT, kv_heads=2, group=4, head_dim=128
        )


def pieces(lengths: list[int], turns: tuple[int, ...]) -> list[Span]:
    """Segments one behind the other, stored `turns` before where they are mapped, in turn."""
    starts = itertools.accumulate([0, *lengths[:-1]])
    return [
        Span(length, start, max(0, start - turns[i % len(turns)]))
        for i, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]


PLAIN = {"dtype": BFLOAT, "q_dtype": BFLOAT, "head_dim": 128}
ANY_LENGTH = [19, 16, 3, 64, 0, 33, 1, 48]
CASES |= {
    "softcap": Spec(MIXED, softcap=5.0, **PLAIN),
    "softcap-window": Spec(MIXED, softcap=20.0, window=30, **PLAIN),
    "no-rope": Spec(MIXED, rotary_dim=0, **PLAIN),
    "partial-rotary": Spec(MIXED, rotary_dim=32, **PLAIN),
    "odd-pairs": Spec(MIXED, rotary_dim=62, **PLAIN),
    "interleaved": Spec(MIXED, interleaved=True, **PLAIN),
    "partial-interleaved": Spec(MIXED, interleaved=True, rotary_dim=32, **PLAIN),
    "far": Spec([(rows([97], start=131_100, offset=131_071), [131_196, 131_150, 131_100])], **PLAIN),
    "many-segments": Spec([(rows([19] * 70, offset=11), [1329])], block_size=8, **PLAIN),
    "many-segments-many-rows": Spec([(rows([19] * 70, offset=11), list(range(1200, 1330)))], **PLAIN),
    "fresh-blocks": Spec([(pieces([16] * 60 + [5], (0, 40, 0, 7)), list(range(300, 960)))], **PLAIN),
    "fresh-blocks-of-two": Spec(
        [(pieces([32, 16, 48] * n, (0, 40)), list(range(96 * n - 90, 96 * n))) for n in (2, 11)],
        block_size=32,
        **PLAIN,
    ),
    "pieces-window": Spec(
        [(pieces(ANY_LENGTH * 7, (0, 50, -3)), list(range(700, 1000)))], window=300, block_size=8, **PLAIN
    ),
    "pieces-256": Spec(
        [(pieces(ANY_LENGTH * 4, (9, 0)), list(range(400, 700)))],
        dtype=BFLOAT,
        q_dtype=BFLOAT,
        head_dim=256,
    ),
    "question-on-7812": Spec([(rows([1000, 54, 6758], offset=54), list(range(7748, 7812)))], **PLAIN),
    "prefill-300": Spec([(rows([300]), list(range(300)))], **PLAIN),
    "prefill-2048-window": Spec([(rows([2048]), list(range(2048)))], window=700, kv_heads=1, **PLAIN),
    "mixed-lengths": Spec(
        [
            (rows([n, n // 2], offset=5), list(range(n, n + k)))
            for n, k in ((50, 1), (700, 300), (1, 1), (9, 5))
        ],
        **PLAIN,
    ),
}


def run(problem: Problem, **options: object) -> AttentionResult:
    moved = on_cuda(problem)
    assert cuda.serves(moved.q, moved.k_cache)
    arguments = {**moved.arguments, **options}
    return ops.paged_attention(moved.q, moved.k_cache, moved.v_cache, moved.plan, **arguments)


@pytest.mark.parametrize("name", CASES)
def test_within_twice_the_error_of_pytorch(name: str) -> None:
    problem = build(CASES[name])
    exact = oracle(problem)
    baseline = same_dtype(problem)
    check(to_cpu(run(problem)).out, problem, exact.out, baseline)  # a turned query may keep fewer digits
    result = to_cpu(run(problem, lse=True, block_mass=True))
    check(result.out, problem, exact.out, baseline)
    # Scores of a thousand have the digits of two terms less ten.
    check_extras(result, exact, mass_rtol=5e-3 if problem.spec.inputs == "x30" else 1e-3)


@pytest.mark.parametrize("chunk", range(20))
def test_random_block_tables(chunk: int) -> None:
    for seed in range(50 * chunk, 50 * (chunk + 1)):
        pick = random.Random(-seed)
        dtype = pick.choice((BFLOAT, HALF))
        spec = replace(
            random_spec(seed),
            dtype=dtype,
            q_dtype=pick.choice((dtype, dtype, FLOAT)),
            head_dim=pick.choice(HEAD_DIMS),
        )
        if spec.rotary_dim and spec.rotary_dim > spec.head_dim:
            spec = replace(spec, rotary_dim=None)
        problem = build(spec)
        exact = oracle(problem)
        result = to_cpu(run(problem, lse=True, block_mass=True))
        try:
            check(result.out, problem, exact.out, same_dtype(problem))
            check_extras(result, exact)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {spec}: {error}") from error


DECODE = Spec([(rows([3000, 54, 1900], offset=40), [4953]), (rows([77]), [76])], group=4, **PLAIN)
QUESTION = Spec([(rows([97, 54, 3330], offset=10), list(range(3400, 3481)))], group=4, **PLAIN)
BOTH = pytest.mark.parametrize("spec", [DECODE, QUESTION], ids=["decode", "question"])


@BOTH
def test_a_hundred_runs_have_the_same_bits(spec: Spec) -> None:
    moved = on_cuda(build(spec))
    first: AttentionResult | None = None
    for _ in range(100):
        result = ops.paged_attention(
            moved.q, moved.k_cache, moved.v_cache, moved.plan, lse=True, block_mass=True, **moved.arguments
        )
        if first is None:
            first = result
        for name in ("out", "lse", "block_mass"):
            assert torch.equal(getattr(result, name), getattr(first, name)), name


@BOTH
@pytest.mark.parametrize("q_dtype", [BFLOAT, FLOAT], ids=str)
def test_values_of_one_give_exactly_one(spec: Spec, q_dtype: torch.dtype) -> None:
    problem = build(replace(spec, inputs="outliers", q_dtype=q_dtype))
    problem.v_cache[~problem.v_cache.isnan()] = 1.0
    out = run(problem).out
    assert torch.equal(out, torch.ones_like(out))


@BOTH
def test_block_mass_without_the_log_sum_exp(spec: Spec) -> None:
    """Many rows then keep the digits that a query came with; what is given away is all of it still."""
    problem = build(spec)
    mass = to_cpu(run(problem, block_mass=True)).block_mass
    assert mass is not None
    exact = oracle(problem).block_mass
    torch.testing.assert_close(mass.double(), exact, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(mass.double().sum(1), exact.sum(1), rtol=1e-3, atol=0.0)


@BOTH
def test_alone_or_in_a_batch_is_equal_when_the_split_is_fixed(spec: Spec) -> None:
    problem = build(spec)
    other = build(replace(DECODE, seed=5))
    together = build(Spec([*spec.sequences, *other.spec.sequences], group=4, **PLAIN))
    count = problem.plan.num_tokens
    with cuda.tuned(cuda.Tuning(fixed_range=8)):
        alone = run(_first_sequences(together, len(spec.sequences), count)).out
        found = run(together).out
    assert torch.equal(found[:count], alone)


def _first_sequences(problem: Problem, num_seqs: int, num_tokens: int) -> Problem:
    plan = problem.plan
    num_segments = int(plan.segment_start[num_seqs])
    return replace(
        problem,
        q=problem.q[:num_tokens],
        plan=AttentionPlan(
            plan.query_start[: num_seqs + 1].contiguous(),
            plan.query_position[:num_tokens].contiguous(),
            plan.segment_start[: num_seqs + 1].contiguous(),
            plan.segments[:num_segments].contiguous(),
            plan.block_ids,
        ),
    )


@BOTH
@pytest.mark.parametrize(
    "tuning",
    [cuda.Tuning(ranges_per_worker=4), cuda.Tuning(warps=2, stages=1), cuda.Tuning(split=False)],
    ids=["finer", "small-blocks", "unsplit"],
)
def test_however_the_work_is_cut_it_is_right(spec: Spec, tuning: cuda.Tuning) -> None:
    problem = build(spec)
    exact = oracle(problem)
    with cuda.tuned(tuning):
        result = to_cpu(run(problem, lse=True, block_mass=True))
    check(result.out, problem, exact.out, same_dtype(problem))
    check_extras(result, exact)


def test_one_graph_serves_changing_lengths() -> None:
    """Decode of three sequences, the third of them padding: captured once, replayed with other integers."""
    block_size, kv_heads, group, head_dim = 16, 2, 4, 128
    spec = Spec([], kv_heads=kv_heads, group=group, block_size=block_size, **PLAIN)
    k_cache, v_cache = (cache for cache in poisoned_pool(spec, 64))
    pool = k_cache._base
    assert pool is not None
    gpu_pool = pool.cuda()
    k_gpu = gpu_pool.as_strided(k_cache.shape, k_cache.stride(), k_cache.storage_offset())
    v_gpu = gpu_pool.as_strided(v_cache.shape, v_cache.stride(), v_cache.storage_offset())
    problem = Problem(spec, torch.empty(0), k_cache, v_cache, AttentionPlan.build([], []), None)
    rotation = build(Spec([(rows([1]), [0])], **PLAIN)).rotation
    assert rotation is not None
    gpu_rotation = replace(rotation, inv_freq=rotation.inv_freq.cuda())

    def integers(lengths: list[int]) -> tuple[AttentionPlan, Tensor]:
        tables, positions, slots = [], [], []
        for sequence, length in enumerate(lengths):
            blocks = list(range(sequence * 20, sequence * 20 + 20))
            cut = min(length, 32)
            tables.append([(blocks[:2], cut, 5, 0), (blocks[2:], length - cut, 5 + cut, 5 + cut)])
            positions.append([5 + max(length, 1) - 1])
            last = length - 1
            slots.append(-1 if length == 0 else blocks[last // block_size] * block_size + last % block_size)
        return AttentionPlan.build(tables, positions), torch.tensor(slots)

    torch.manual_seed(3)
    for _ in range(2):  # all blocks but those of the third sequence hold something
        keys, values = torch.randn(2, 40 * block_size, kv_heads, head_dim).to(BFLOAT).unbind()
    fill(k_cache, v_cache, list(range(40)), keys, values)
    gpu_pool.copy_(pool)

    plan, slots = integers([40, 310, 0])
    live = AttentionPlan(
        *(getattr(plan, name).cuda() for name in ("query_start", "query_position", "segment_start")),
        plan.segments.cuda(),
        plan.block_ids.cuda(),
    )
    live_slots = slots.cuda()
    q, k, v = (torch.randn(3, heads, head_dim, device="cuda", dtype=BFLOAT) for heads in (8, 2, 2))
    options = {"rotation": gpu_rotation, "scale": head_dim**-0.5}

    def step() -> AttentionResult:
        live.refresh()
        ops.write_kv(k, v, k_gpu, v_gpu, live_slots)
        return ops.paged_attention(q, k_gpu, v_gpu, live, lse=True, block_mass=True, **options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([40, 310, 0], [41, 5, 0], [300, 33, 0], [1, 0, 0]):
        plan, slots = integers(lengths)
        for name in ("query_position", "segments", "block_ids"):
            getattr(live, name).copy_(getattr(plan, name))
        live_slots.copy_(slots)
        for tensor in (q, k, v):
            tensor.normal_()
        captured.out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = reference_step(problem, plan, slots, q, k, v, rotation)
        torch.testing.assert_close(captured.out.cpu().float(), expected.out.float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(captured.lse.cpu(), expected.lse, rtol=1e-3, atol=1e-3)  # type: ignore[union-attr]
        torch.testing.assert_close(
            captured.block_mass.cpu(),  # type: ignore[union-attr]
            expected.block_mass,
            rtol=1e-2,
            atol=1e-4,
        )


def reference_step(
    problem: Problem,
    plan: AttentionPlan,
    slots: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: ops.Rotation,
) -> AttentionResult:

    used = slots >= 0
    reference.write_kv(
        k.cpu()[used], v.cpu()[used], problem.k_cache, problem.v_cache, slots[used].contiguous()
    )
    return reference.paged_attention(
        q.cpu(),
        problem.k_cache,
        problem.v_cache,
        plan,
        rotation=rotation,
        scale=q.shape[-1] ** -0.5,
        lse=True,
        block_mass=True,
    )


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("source", [FLOAT, BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_every_element_lands_in_its_place(block_size: int, source: torch.dtype, dtype: torch.dtype) -> None:
    spec = Spec([], dtype=dtype, block_size=block_size, kv_heads=3, head_dim=80)
    k, v = torch.randn(2, 75, 3, 80).to(source).unbind()
    blocks = [7, 0, 9, 3, 5, 8, 2, 1, 6, 4]
    slots = torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(75)])
    expected = [cache.clone() for cache in poisoned_pool(spec, 10)]
    fill(expected[0], expected[1], blocks, k.float().to(dtype), v.float().to(dtype))
    k_cache, v_cache = poisoned_pool(spec, 10)
    pool = k_cache._base
    assert pool is not None
    moved = pool.cuda()
    caches = [
        moved.as_strided(cache.shape, cache.stride(), cache.storage_offset()) for cache in (k_cache, v_cache)
    ]
    padded = torch.cat((slots, torch.tensor([-1, 2**40]))).cuda()
    extra = torch.full((2, 3, 80), 7.0).to(source)
    ops.write_kv(torch.cat((k, extra)).cuda(), torch.cat((v, extra)).cuda(), *caches, padded)
    for found, right in zip(caches, expected, strict=True):
        torch.testing.assert_close(found.cpu(), right, rtol=0, atol=0, equal_nan=True)
    assert moved.view(10, 2, 2, -1)[:, 0].isnan().all()  # the other layer


def test_blocks_are_copied_whole() -> None:
    source = torch.randint(0, 256, (9, 4096 * 3), dtype=torch.uint8, device="cuda")
    target = torch.zeros(12, 4096 * 3, dtype=torch.uint8, device="cuda")
    source_ids, target_ids = torch.tensor([8, 0, 3]).cuda(), torch.tensor([2, 11, 5]).cuda()
    ops.copy_blocks(source, source_ids, target, target_ids)
    assert torch.equal(target[target_ids], source[source_ids])
    assert int(target.count_nonzero(1).gt(0).sum()) == 3
    staged = torch.empty(3, 4096 * 3, dtype=torch.uint8, device="cuda")
    ops.copy_blocks(source, source_ids, staged, None)
    assert torch.equal(staged, source[source_ids])
    pinned = source.cpu().pin_memory()
    ops.copy_blocks(pinned, None, target[:9], None)
    assert torch.equal(target[:9], source)
    room = torch.zeros(9, 4096 * 3, dtype=torch.uint8, device="cuda")
    ops.copy_blocks(source, None, room[:4], None)  # as many as both have, and no more
    assert torch.equal(room[:4], source[:4])
    assert not room[4:].any()


def test_block_ids_whose_offset_passes_2_to_the_31() -> None:
    spec = Spec([(rows([40]), [39])], kv_heads=2, group=4, **PLAIN)
    problem = build(spec)
    near = run(problem).out
    block = 2 * 2 * 2 * 128 * 16  # elements: two layers of K and V
    num_blocks = 5 * 2**30 // (2 * block)
    pool = torch.empty(num_blocks, 2, 2, block // 4, dtype=BFLOAT, device="cuda")
    far = [num_blocks - 1, num_blocks // 2 + 7, num_blocks - 2]
    ids = problem.plan.block_ids.tolist()[:3]
    base = problem.k_cache._base
    assert base is not None
    pool[far] = base.view(-1, 2, 2, block // 4)[ids].cuda()
    assert far[0] * block * 2 > 2**32
    moved = on_cuda(problem)
    k_cache = pool[:, 1, 0].view(num_blocks, *problem.k_cache.shape[1:])
    v_cache = pool[:, 1, 1].view(num_blocks, *problem.v_cache.shape[1:])
    plan = AttentionPlan.build([[(far, 40, 0, 0)]], [[39]], "cuda")
    assert torch.equal(ops.paged_attention(moved.q, k_cache, v_cache, plan, **moved.arguments).out, near)


def test_one_block_at_two_offsets_equals_two_copies() -> None:
    problem = build(Spec([(rows([54, 54], offset=30), [107, 80])], group=4, **PLAIN))
    ids = problem.plan.block_ids.tolist()
    first, second = ids[:4], ids[5:9]
    fill(problem.k_cache, problem.v_cache, second, problem.keys[0][0], problem.values[0][0])
    (_, n, position, stored), (_, _, later, _) = problem.plan.segments.tolist()
    outs = []
    for blocks in (second, first):
        plan = AttentionPlan.build([[(first, n, position, stored), (blocks, n, later, stored)]], [[107, 80]])
        outs.append(run(replace(problem, plan=plan)).out)
    assert torch.equal(*outs)
