"""What the kernels are measured on: sizes, a block pool full of random numbers, plans of scattered blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memkv.kernels import ops
from memkv.kernels.ops import AttentionPlan


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.kv_heads}/{self.head_dim}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    pool_bytes: int
    num_layers: int
    shapes: tuple[tuple[int, int], ...]
    replays: int
    peers: bool = True
    many_queries: bool = True
    other_heads: tuple[Heads, ...] = (Heads(9, 3, 64), Heads(16, 8, 256), Heads(32, 32, 128))


GPU_SIZES = Sizes(
    pool_bytes=64 << 30,
    num_layers=32,
    shapes=((1, 4096), (1, 32_768), (1, 131_072), (8, 8192), (32, 4096), (64, 8192)),
    replays=20,
)
CPU_SIZES = Sizes(
    pool_bytes=1 << 28,
    num_layers=8,
    shapes=((1, 4096), (2, 2048)),
    replays=5,
    many_queries=False,
    other_heads=(Heads(9, 3, 64),),
)


class Pool:
    """A block pool of one layout, full of random numbers; calls rotate through its layers."""

    def __init__(
        self, device: torch.device, heads: Heads, block_size: int, num_bytes: int, num_layers: int
    ) -> None:
        self.heads, self.block_size, self.num_layers = heads, block_size, num_layers
        slab = heads.kv_heads * heads.head_dim * block_size
        most = num_bytes // (2 * num_layers * 2 * slab)
        self.num_blocks = most
        self.storage = torch.empty(most, self.num_layers, 2, slab, dtype=torch.bfloat16, device=device)
        if device.type == "cpu":
            ops.prefer_huge_pages(self.storage)
        self.storage.normal_()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        heads, size = self.heads, self.block_size
        k = self.storage[:, index, 0].view(-1, heads.kv_heads, heads.head_dim // 8, size, 8)
        return k, self.storage[:, index, 1].view(-1, heads.kv_heads, heads.head_dim, size)

    def plan(
        self,
        batch: int,
        context: int,
        segment_tokens: int = 0,
        query_positions: Sequence[int] | None = None,
        shared: bool = False,
    ) -> AttentionPlan:
        """Sequences of scattered blocks in segments (eight, unless told how long) that were stored elsewhere.

        `shared`: every sequence maps the same blocks, each at another position.
        """
        size = self.block_size
        per_sequence = -(-context // size)
        needed = per_sequence * (1 if shared else batch)
        ids = torch.randperm(self.num_blocks)[:needed].tolist()
        length = max(size, segment_tokens or context // 8 // size * size)
        tables, positions = [], []
        for sequence in range(batch):
            own = ids if shared else ids[sequence * per_sequence : (sequence + 1) * per_sequence]
            start = sequence if shared else 0
            segments = []
            for first in range(0, context, length):
                count = min(length, context - first)
                blocks = own[first // size : first // size + -(-count // size)]
                segments.append((blocks, count, start + first, (first * 7 + 37) % context))
            tables.append(segments)
            positions.append([start + p for p in query_positions or [context - 1]])
        return AttentionPlan.build(tables, positions, self.storage.device)

    def refreshed_plan(self, num_chunks: int, chunk_tokens: int, share: float) -> AttentionPlan:
        """One sequence of chunks stored elsewhere, a share of their blocks, drawn at random, computed afresh.

        Tokens of fresh blocks are the query rows.
        """
        size = self.block_size
        per_chunk = chunk_tokens // size
        count = num_chunks * per_chunk
        ids = torch.randperm(self.num_blocks)[:count].tolist()
        fresh = set(torch.randperm(count)[: round(share * count)].tolist())

        def piece(index: int) -> tuple[int, bool]:
            return index // per_chunk, index in fresh

        segments = []
        for (chunk, is_fresh), blocks in itertools.groupby(range(count), piece):
            own = list(blocks)
            position = own[0] * size
            stored_position = position if is_fresh else position - chunk * chunk_tokens + 37
            segments.append(([ids[block] for block in own], len(own) * size, position, stored_position))
        rows = [index * size + token for index in sorted(fresh) for token in range(size)]
        return AttentionPlan.build([segments], [rows], self.storage.device)
