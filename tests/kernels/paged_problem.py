"""Attention problems with poisoned pools, their answer in float64, and PyTorch's in the same dtype.

The oracle materialises each mapped sequence at absolute positions, keys re-rotated: it shares no step with
the kernels, which rotate the query.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memkv.kernels import AttentionPlan, AttentionResult, Rotation, cuda

Attend = Callable[..., AttentionResult]  # the fixtures of conftest.py

NO_CUDA = "" if torch.cuda.is_available() and cuda.built() else "no CUDA device, or built without CUDA"
GARBAGE_ID = 2_147_480_000
LAYERS, LAYER = 2, 1  # the pool holds two layers, of which the second is used: blocks are not adjacent


@dataclass(frozen=True)
class Span:
    """A segment before it has blocks."""

    num_tokens: int
    position: int
    stored_position: int


@dataclass(frozen=True)
class Spec:
    """What to build. `sequences`: segments and query positions of each."""

    sequences: Sequence[tuple[Sequence[Span], Sequence[int]]]
    dtype: torch.dtype = torch.float32
    q_dtype: torch.dtype = torch.float32
    block_size: int = 16
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    rotary_dim: int | None = None  # None: all of head_dim; 0: no RoPE
    interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    inputs: str = "normal"
    seed: int = 0


@dataclass
class Problem:
    spec: Spec
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    plan: AttentionPlan
    rotation: Rotation | None
    keys: list[list[Tensor]] = field(
        default_factory=list
    )  # [sequence][segment] -> [tokens, kv_heads, head_dim]
    values: list[list[Tensor]] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "rotation": self.rotation,
            "scale": self.spec.head_dim**-0.5,
            "window": self.spec.window,
            "softcap": self.spec.softcap,
        }


@dataclass
class Answer:
    out: Tensor  # float64 [num_tokens, num_heads, head_dim]
    lse: Tensor  # float64 [num_tokens, num_heads]
    block_mass: Tensor  # float64 [num_heads, num_entries]


def rows(lengths: Sequence[int], start: int = 0, offset: int = 0) -> list[Span]:
    """Segments one behind the other from position `start`, each stored `offset` before where it is mapped."""
    spans = []
    for length in lengths:
        spans.append(Span(length, start, max(0, start - offset)))
        start += length
    return spans


def build(spec: Spec) -> Problem:
    generator = torch.Generator().manual_seed(spec.seed)
    shuffled = random.Random(spec.seed)
    needed = sum(-(-span.num_tokens // spec.block_size) for spans, _ in spec.sequences for span in spans)
    num_blocks = needed + 3
    k_cache, v_cache = poisoned_pool(spec, num_blocks)
    free = list(range(num_blocks))
    shuffled.shuffle(free)
    num_heads = spec.kv_heads * spec.group
    num_tokens = sum(len(positions) for _, positions in spec.sequences)
    q = torch.randn(num_tokens, num_heads, spec.head_dim, generator=generator)
    problem = Problem(spec, q, k_cache, v_cache, _EMPTY, _rotation(spec))
    tables = []
    for spans, _ in spec.sequences:
        table, keys, values = [], [], []
        for span in spans:
            shape = (span.num_tokens, spec.kv_heads, spec.head_dim)
            k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
            keys.append(_shape_keys(k, q, spec, generator).to(spec.dtype))
            values.append(v.to(spec.dtype))
            count = -(-span.num_tokens // spec.block_size)
            blocks = [free.pop() for _ in range(count)]
            fill(k_cache, v_cache, blocks, keys[-1], values[-1])
            table.append(([*blocks, GARBAGE_ID], span.num_tokens, span.position, span.stored_position))
        tables.append(table)
        problem.keys.append(keys)
        problem.values.append(values)
    scale = {"x30": 30.0, "one_hot": 20.0}.get(spec.inputs, 1.0)
    problem.q = (q * scale).to(spec.q_dtype)
    problem.plan = AttentionPlan.build(tables, [positions for _, positions in spec.sequences])
    return problem


def poisoned_pool(spec: Spec, num_blocks: int) -> tuple[Tensor, Tensor]:
    """k_cache and v_cache of one layer of a pool that is NaN all over."""
    x = 16 // spec.dtype.itemsize
    slab = spec.kv_heads * spec.head_dim * spec.block_size
    pool = torch.full((num_blocks, LAYERS, 2, slab), math.nan, dtype=spec.dtype)
    k_shape = (num_blocks, spec.kv_heads, spec.head_dim // x, spec.block_size, x)
    v_shape = (num_blocks, spec.kv_heads, spec.head_dim, spec.block_size)
    return pool[:, LAYER, 0].view(k_shape), pool[:, LAYER, 1].view(v_shape)


def fill(k_cache: Tensor, v_cache: Tensor, blocks: Sequence[int], keys: Tensor, values: Tensor) -> None:
    """Write tokens into blocks by the layout's definition, one token at a time."""
    block_size = k_cache.shape[3]
    for token in range(keys.shape[0]):
        block, slot = blocks[token // block_size], token % block_size
        k_cache[block, :, :, slot, :] = keys[token].view(k_cache.shape[1], k_cache.shape[2], k_cache.shape[4])
        v_cache[block, :, :, slot] = values[token]


def on_cuda(problem: Problem) -> Problem:
    """The same on a GPU, the pool's strides kept."""

    def moved(cache: Tensor) -> Tensor:
        pool = cache._base
        assert pool is not None, "bug: caches are views of a pool"
        return pool.cuda().as_strided(cache.shape, cache.stride(), cache.storage_offset())

    plan = problem.plan
    names = ("query_start", "query_position", "segment_start", "segments", "block_ids")
    rotation = problem.rotation
    return replace(
        problem,
        q=problem.q.cuda(),
        k_cache=moved(problem.k_cache),
        v_cache=moved(problem.v_cache),
        plan=AttentionPlan(**{name: getattr(plan, name).cuda() for name in names}),
        rotation=None if rotation is None else Rotation(rotation.inv_freq.cuda(), rotation.interleaved),
    )


def to_cpu(result: AttentionResult) -> AttentionResult:
    return AttentionResult(
        *(None if x is None else x.cpu() for x in (result.out, result.lse, result.block_mass))  # type: ignore[arg-type]
    )


def oracle(problem: Problem) -> Answer:
    return _attend(problem, torch.float64, torch.float64)


def same_dtype(problem: Problem) -> Tensor:
    """What PyTorch makes of it: keys rotated to where they are mapped, then attention in q's dtype."""
    return _attend(problem, problem.q.dtype, torch.float32).out


def check(found: Tensor, problem: Problem, exact: Tensor, baseline: Tensor) -> None:
    """The acceptance: twice PyTorch's own error plus 1e-5, and a cosine difference below 1e-5."""
    assert found.dtype == problem.q.dtype
    assert found.shape == problem.q.shape
    assert not found.isnan().any()
    error = (found.double() - exact).abs().max().item() if found.numel() else 0.0
    allowed = 2 * (baseline.double() - exact).abs().max().item() + 1e-5 if found.numel() else 0.0
    assert error <= allowed, f"max error {error:.3g}, allowed {allowed:.3g}"
    norms = found.double().norm() * exact.norm()
    if norms > 0:
        cosine = (found.double() * exact).sum() / norms
        assert 1 - cosine.item() < 1e-5, f"cosine difference {1 - cosine.item():.3g}"


def check_extras(result: AttentionResult, exact: Answer, mass_rtol: float = 1e-3) -> None:
    """Log-sum-exp and block mass, which are float32 whatever the dtypes."""
    assert result.lse is not None
    assert result.block_mass is not None
    torch.testing.assert_close(result.lse.double(), exact.lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(result.block_mass.double(), exact.block_mass, rtol=mass_rtol, atol=1e-4)


def rotate(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """Turn the pairs of x [..., head_dim] by `angle` [rotary_dim / 2], through complex numbers."""
    half = angle.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turning.unflatten(-1, (half, 2)) if interleaved else turning.unflatten(-1, (2, half)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_real(turned)
    return torch.cat((pairs.flatten(-2) if interleaved else pairs.mT.flatten(-2), rest), dim=-1)


def _attend(problem: Problem, dtype: torch.dtype, rotate_in: torch.dtype) -> Answer:
    spec, plan = problem.spec, problem.plan
    num_heads = spec.kv_heads * spec.group
    out = torch.zeros(problem.q.shape, dtype=dtype)
    lse = torch.full((plan.num_tokens, num_heads), -torch.inf, dtype=torch.float64)
    mass = torch.zeros(num_heads, plan.num_entries, dtype=torch.float64)
    first_row = first_entry = 0
    for (spans, query_positions), keys, values in zip(
        spec.sequences, problem.keys, problem.values, strict=True
    ):
        placed, entries, key_positions = [], [], []
        for span, key in zip(spans, keys, strict=True):
            moved = key.to(rotate_in)
            if problem.rotation is not None and span.num_tokens:
                angle = (span.position - span.stored_position) * problem.rotation.inv_freq
                moved = rotate(moved, angle.to(rotate_in), spec.interleaved)
            placed.append(moved.to(dtype))
            token = torch.arange(span.num_tokens)
            key_positions.append(span.position + token)
            entries.append(first_entry + token // spec.block_size)
            first_entry += -(-span.num_tokens // spec.block_size) + 1  # and the garbage entry
        taken = slice(first_row, first_row + len(query_positions))
        first_row = taken.stop
        if not spans or not query_positions:
            continue
        k = torch.cat(placed).transpose(0, 1).repeat_interleave(spec.group, 0)
        v = torch.cat(values).to(dtype).transpose(0, 1).repeat_interleave(spec.group, 0)
        position, query = torch.cat(key_positions), torch.tensor(query_positions)[:, None]
        visible = position <= query
        if spec.window:
            visible &= position > query - spec.window
        q = problem.q[taken].to(dtype).transpose(0, 1)
        if dtype != torch.float64 and not spec.softcap:
            found = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible)[0]
            out[taken] = found.nan_to_num().masked_fill(~visible.any(-1)[None, :, None], 0).transpose(0, 1)
            continue
        score = (q @ k.mT) * spec.head_dim**-0.5
        if spec.softcap:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        score = score.masked_fill(~visible, -torch.inf)
        weight = torch.softmax(score, -1).nan_to_num(0.0)
        out[taken] = (weight @ v).transpose(0, 1)
        lse[taken] = torch.logsumexp(score.double(), -1).T
        mass.index_add_(1, torch.cat(entries), weight.double().sum(1))
    return Answer(out, lse, mass)


def _rotation(spec: Spec) -> Rotation | None:
    dim = spec.head_dim if spec.rotary_dim is None else spec.rotary_dim
    if dim == 0:
        return None
    inv_freq = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return Rotation(inv_freq, spec.interleaved)


def _shape_keys(k: Tensor, q: Tensor, spec: Spec, generator: torch.Generator) -> Tensor:
    if spec.inputs == "outliers":  # some channels are far larger than the rest
        channels = torch.randperm(spec.head_dim, generator=generator)[:3]
        k[..., channels] *= 40.0
    elif spec.inputs == "equal_keys":
        k[:] = torch.randn(spec.kv_heads, spec.head_dim, generator=generator)
    elif spec.inputs == "one_hot" and k.shape[0] and q.shape[0]:  # one key outweighs all others
        k *= 0.05
        k[k.shape[0] // 2] = q[-1].view(spec.kv_heads, spec.group, -1)[:, 0]
    elif spec.inputs == "x30":
        k *= 30.0
    return k


_EMPTY = AttentionPlan.build([], [])


def random_spec(seed: int) -> Spec:
    """Any mix of what the kernels promise, small enough to try many."""
    pick = random.Random(seed)
    block_size = pick.choice((8, 16, 32))
    sequences = []
    for _ in range(pick.choice((1, 1, 2, 5))):
        spans, position = [], pick.choice((0, 0, 3, 40))
        for _ in range(pick.choice((0, 1, 2, 4))):
            length = pick.choice((0, 1, 7, block_size, 54, 97))
            stored = pick.choice((position, 0, position + 17, 131_071))
            spans.append(Span(length, position, stored))
            position += length + pick.choice((0, 0, 5))
        count = pick.choice((0, 1, 1, 1, 2, 6, 30))
        sequences.append((spans, [pick.randrange(position + 2) for _ in range(count)]))
    head_dim = pick.choice((16, 24, 64, 64, 128))
    spec = Spec(
        sequences,
        dtype=pick.choice((torch.float32, torch.bfloat16)),
        q_dtype=pick.choice((torch.float32, torch.bfloat16)),
        block_size=block_size,
        head_dim=head_dim,
        kv_heads=pick.choice((1, 2, 3)),
        group=pick.choice((1, 2, 3, 4, 5, 7)),
        rotary_dim=pick.choice((None, None, 0, head_dim // 2)),
        interleaved=pick.random() < 0.3,
        inputs=pick.choice(("normal", "normal", "outliers", "one_hot", "equal_keys")),
        seed=seed,
    )
    return replace(spec, window=pick.choice((0, 0, 1, 9, 60)), softcap=pick.choice((0.0, 0.0, 5.0)))
