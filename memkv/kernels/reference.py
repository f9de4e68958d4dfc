"""The kernels in plain PyTorch, on any device: what `ops` computes, written for reading.

    score(p, j) = scale * R(p - d) q · R(j) k      d = position - stored_position of the segment that holds j
    out(p)      = sum_j softmax_j(score(p, j)) v_j   over keys with  p - window < position of j <= p

q arrives rotated to p, so the kernel turns it by -d once per segment; stored keys are never touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memkv.errors import KernelArgumentError
from memkv.kernels.plan import AttentionPlan, AttentionResult, Rotation


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Put keys and values of new tokens into their slots; same contract as `ops.write_kv`."""
    num_blocks, kv_heads, pieces, block_size, x = k_cache.shape
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < num_blocks * block_size:
        raise KernelArgumentError(f"a slot is outside [0, {num_blocks * block_size})")
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, :, offset, :] = k.reshape(-1, kv_heads, pieces, x).to(k_cache.dtype)
    v_cache[block, :, :, offset] = v.to(v_cache.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    rotation: Rotation | None,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    lse: bool = False,
    block_mass: bool = False,
) -> AttentionResult:
    """Attention over mapped segments; same contract as `ops.paged_attention`, float64 q allowed.

    Computes in float32, or in float64 where q is float64.
    """
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_tokens, num_heads, _ = q.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    all_lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q.device)
    mass = torch.zeros((num_heads, plan.num_entries), dtype=torch.float32, device=q.device)
    turns = None if rotation is None else plan.turns(rotation).to(real)
    query_start, segment_start = plan.query_start.tolist(), plan.segment_start.tolist()
    for sequence in range(plan.num_seqs):
        rows = slice(query_start[sequence], query_start[sequence + 1])
        segments = range(segment_start[sequence], segment_start[sequence + 1])
        if rows.start == rows.stop or not plan.segments[segments.start : segments.stop, 1].any():
            continue
        query = q[rows].to(real).transpose(0, 1) * scale  # [num_heads, rows, head_dim]
        positions = plan.query_position[rows]
        parts = [
            _segment(query, k_cache, v_cache, plan, index, positions, rotation, turns, window, softcap)
            for index in segments
        ]
        score = torch.cat([part.score for part in parts], dim=-1)  # [num_heads, rows, keys]
        values = torch.cat([part.values for part in parts], dim=-2)
        entries = torch.cat([part.entries for part in parts])
        top = score.amax(dim=-1, keepdim=True)
        weight = torch.exp(score - top.masked_fill(top == -torch.inf, 0.0))
        total = weight.sum(dim=-1, keepdim=True)  # 0 for a row that sees no key
        weight = weight / total.masked_fill(total == 0.0, 1.0)
        out[rows] = (weight @ values).transpose(0, 1).to(q.dtype)
        all_lse[rows] = (top + total.log()).squeeze(-1).T.float()
        mass.index_add_(1, entries, weight.sum(dim=1).float())
    return AttentionResult(out, all_lse if lse else None, mass if block_mass else None)


class _SegmentScores:
    def __init__(self, score: Tensor, values: Tensor, entries: Tensor) -> None:
        self.score = score  # [num_heads, rows, tokens], -inf where not visible
        self.values = values  # [num_heads, tokens, head_dim]
        self.entries = entries  # [tokens], entry of plan.block_ids that holds each token


def _segment(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    index: int,
    positions: Tensor,
    rotation: Rotation | None,
    turns: Tensor | None,
    window: int,
    softcap: float,
) -> _SegmentScores:
    block_size = k_cache.shape[3]
    first, num_tokens, position, _ = plan.segments[index].tolist()
    token = torch.arange(num_tokens, device=query.device)
    entries = first + token // block_size
    block, offset = plan.block_ids[entries].long(), token % block_size
    # [tokens, kv_heads, ...] -> [num_heads, tokens, head_dim]
    keys = k_cache[block, :, :, offset, :].flatten(2).transpose(0, 1).to(query.dtype)
    values = v_cache[block, :, :, offset].transpose(0, 1).to(query.dtype)
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    if rotation is not None and turns is not None:
        query = rotate(query, turns[index, 0], turns[index, 1], rotation.interleaved)
    score = query @ keys.transpose(-1, -2)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    key_position = position + token
    visible = key_position <= positions[:, None]
    if window:
        visible &= key_position > positions[:, None] - window
    return _SegmentScores(score.masked_fill(~visible, -torch.inf), values, entries)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the rotary pairs of x [..., head_dim] by angles whose cos and sin are [..., rotary_dim / 2]."""
    half = cos.shape[-1]
    turned = x.clone()
    pairs = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(half), slice(half, 2 * half))
    )
    a, b = x[..., pairs[0]], x[..., pairs[1]]
    turned[..., pairs[0]] = a * cos - b * sin
    turned[..., pairs[1]] = b * cos + a * sin
    return turned
