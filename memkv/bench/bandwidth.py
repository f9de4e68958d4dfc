"""How fast this machine reads memory, and how fast the attention kernel reads KV.

Both read more than the last-level cache holds, over and over. Decimal gigabytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from memkv.engine.kv_cache import KVCache
from memkv.errors import ModelError
from memkv.kernels.ops import AttentionPlan, Rotation, measure_read_bandwidth, paged_attention
from memkv.kv.layout import KVLayout
from memkv.model.support import ModelSpec

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 64_000_000


def last_level_cache_bytes() -> int:
    """Size of the largest cache that the first CPU sees; a guess where the system does not tell."""
    sizes = [_cache_bytes(path.read_text()) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=_UNKNOWN_CACHE)


def machine_read_gbs(num_bytes: int, repeats: int) -> float:
    """Best rate of several passes over `num_bytes`: by the kernels' own probe, and by torch's reductions on
    any number of threads.
    """
    values = torch.ones(num_bytes // 4, dtype=torch.float32)
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    readers: tuple[Callable[[], object], ...] = (values.sum, values.amax)
    best = float("inf")
    try:
        for count in range(1, cores + 1):
            torch.set_num_threads(count)
            best = min(best, *(_best_seconds(reader, repeats) for reader in readers))
    finally:
        torch.set_num_threads(threads)
    return max(values.numel() * 4 / best / 1e9, measure_read_bandwidth(num_bytes, repeats))


def kernel_read_gbs(spec: ModelSpec, layout: KVLayout, num_bytes: int, repeats: int) -> float:
    """Best rate at which one decode step's attention reads KV, at the pool's real strides.

    One query token per sequence over all layers, one after the other as a model asks for them; the sequences
    together map `num_bytes` of KV, in segments that stand elsewhere than where they were stored.
    """
    if layout.dtype == "float16":
        raise ModelError("the CPU kernels read float32 and bfloat16", hint="set kv.dtype = bfloat16")
    num_blocks = max(1, num_bytes // layout.bytes_per_block)
    cache = KVCache(layout, num_blocks)
    for index in range(layout.num_layers):
        for part in cache.layer(index):
            part.fill_(0.5)
    plan = _plan(num_blocks, layout.block_size)
    rope = spec.layers[0].rope
    rotation = (
        None if rope is None else Rotation(torch.tensor(rope.inv_freq, dtype=torch.float64), rope.interleaved)
    )
    q = torch.randn(plan.num_tokens, spec.num_heads, spec.head_dim)
    scale = spec.head_dim**-0.5

    def step() -> None:
        for index in range(layout.num_layers):
            paged_attention(q, *cache.layer(index), plan, rotation=rotation, scale=scale)

    return num_blocks * layout.bytes_per_block / _best_seconds(step, repeats) / 1e9


def _plan(num_blocks: int, block_size: int) -> AttentionPlan:
    """One query token behind all blocks, mapped as segments of 16 blocks, in reverse order."""
    per_segment = 16
    starts = range(0, num_blocks, per_segment)
    segments: list[tuple[list[int], int, int, int]] = []
    position = 0
    for start in reversed(starts):
        blocks = list(range(start, min(start + per_segment, num_blocks)))
        segments.append((blocks, len(blocks) * block_size, position, 7))
        position += len(blocks) * block_size
    return AttentionPlan.build([segments], [[position]], torch.device("cpu"))


def _best_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _cache_bytes(text: str) -> int:
    """`32768K` as bytes."""
    number, unit = text.strip().rstrip("KM"), text.strip()[-1]
    return int(number) * {"K": 1024, "M": 1024**2}.get(unit, 1)
