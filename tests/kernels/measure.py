"""Measures the CPU kernels: decode against the read bandwidth of the same run, prefill in GFLOP/s.

    python tests/kernels/measure.py [--isa avx2] [--threads 1] [--block-size 32] [--small-pages]

The pool is 256 MiB, far more than a last-level cache, its blocks mapped in random order at the stride of all
their layers; every layer of a decode step reads its own part of every block.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from memkv.kernels import AttentionPlan, Rotation, ops

POOL_BYTES = 1 << 28
LAYERS = 8
SEGMENT_BLOCKS = 16  # a chunk of 256 tokens at block size 16
SHAPES = ((9, 3, 64), (32, 8, 128))  # query heads, kv heads, head_dim: SmolLM2-135M, Llama-3 8B
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--isa", default=ops.isa(), choices=ops.runnable_isas())
    parser.add_argument("--threads", type=int, default=0, help="0: calibrated")
    parser.add_argument("--block-size", type=int, default=16, choices=(8, 16, 32))
    parser.add_argument("--small-pages", action="store_true", help="leave the pool on 4 KiB pages")
    options = parser.parse_args()
    ops.set_isa(options.isa)
    if options.threads:
        ops.set_num_threads(options.threads)
    else:
        ops.calibrate_threads()
    torch.set_num_threads(1)
    print(f"isa {ops.isa()}, {ops.num_threads()} threads, block size {options.block_size}")
    for heads in SHAPES:
        decode(*heads, options.block_size, huge=not options.small_pages)
    for heads in SHAPES:
        prefill(*heads, options.block_size)


def decode(num_heads: int, kv_heads: int, head_dim: int, block_size: int, huge: bool) -> None:
    slab = kv_heads * head_dim * block_size
    num_blocks = POOL_BYTES // (2 * LAYERS * 2 * slab)
    num_blocks -= num_blocks % SEGMENT_BLOCKS
    pool = torch.empty(num_blocks, LAYERS, 2, slab, dtype=torch.bfloat16)
    if huge:
        ops.prefer_huge_pages(pool)
    pool.normal_()
    layers = [views(pool, layer, kv_heads, head_dim, block_size) for layer in range(LAYERS)]
    ids = torch.randperm(num_blocks).tolist()
    segments, position = [], 0
    for first in range(0, num_blocks, SEGMENT_BLOCKS):
        num_tokens = SEGMENT_BLOCKS * block_size
        segments.append((ids[first : first + SEGMENT_BLOCKS], num_tokens, position, 37))
        position += num_tokens
    plan = AttentionPlan.build([segments], [[position]])
    rotation, q = rope(head_dim), torch.randn(1, num_heads, head_dim)

    def step() -> None:
        for k_cache, v_cache in layers:
            ops.paged_attention(q, k_cache, v_cache, plan, rotation=rotation, scale=head_dim**-0.5)

    rates, shares = [], []
    for _ in range(REPEATS):
        machine = ops.measure_read_bandwidth(POOL_BYTES, passes=2)
        rates.append(pool.numel() * 2 / seconds(step) / 1e9)
        shares.append(rates[-1] / machine)
    print(
        f"decode  {num_heads}/{kv_heads}/{head_dim} bfloat16, context {position}: "
        f"{statistics.median(rates):.1f} GB/s of KV, {statistics.median(shares):.0%} of the read bandwidth"
    )


def prefill(num_heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    for title, num_seqs, before, fresh in (
        ("2048 tokens", 1, 0, 2048),
        ("8 chunks of 256 behind 40", 8, 40, 256),
        ("32 question tokens on 2048", 1, 2048, 32),
    ):
        num_tokens = before + fresh
        blocks = -(-num_tokens // block_size)
        pool = torch.randn(num_seqs * blocks, 1, 2, kv_heads * head_dim * block_size).bfloat16()
        k_cache, v_cache = views(pool, 0, kv_heads, head_dim, block_size)
        ids = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).tolist()
        plan = AttentionPlan.build(
            [[(row, num_tokens, 0, 0)] for row in ids], [range(before, num_tokens)] * num_seqs
        )
        q = torch.randn(num_seqs * fresh, num_heads, head_dim)
        operations = 4 * num_heads * head_dim * num_seqs * sum(range(before + 1, num_tokens + 1))
        step = partial(
            ops.paged_attention, q, k_cache, v_cache, plan, rotation=rope(head_dim), scale=head_dim**-0.5
        )
        rate = operations / statistics.median(seconds(step) for _ in range(REPEATS)) / 1e9
        print(f"prefill {num_heads}/{kv_heads}/{head_dim} bfloat16, {title}: {rate:.0f} GFLOP/s")


def views(pool: Tensor, layer: int, kv_heads: int, head_dim: int, block_size: int) -> tuple[Tensor, Tensor]:
    """k_cache and v_cache of a layer of pool [num_blocks, layers, 2, slab]."""
    k_cache = pool[:, layer, 0].view(-1, kv_heads, head_dim // 8, block_size, 8)
    return k_cache, pool[:, layer, 1].view(-1, kv_heads, head_dim, block_size)


def rope(head_dim: int) -> Rotation:
    return Rotation(10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim))


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
