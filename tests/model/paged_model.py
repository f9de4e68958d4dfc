"""A model on a small block pool: enough of an engine to compare its logits with transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memkv.kernels.plan import AttentionPlan
from memkv.kv.layout import KVLayout
from memkv.model.attention import StepContext, forward, layer_attention
from memkv.model.support import ModelSpec

Segment = tuple[list[int], int, int, int]  # blocks, num_tokens, position, stored_position


@dataclass
class Row:
    """One sequence's share of a step: tokens that continue its private blocks, behind mapped segments."""

    token_ids: list[int]
    position: int  # of the first token; also the stored position of the private segment's first token
    blocks: list[int]
    mapped: list[Segment] = field(default_factory=list)
    already: int = 0  # tokens that the private blocks hold from earlier steps

    def positions(self) -> list[int]:
        start = self.position + self.already
        return list(range(start, start + len(self.token_ids)))


class PagedModel:
    """Owns a pool in the block layout, poisoned with NaN."""

    def __init__(
        self, module: PreTrainedModel, spec: ModelSpec, num_blocks: int = 64, block_size: int = 16
    ) -> None:
        self.module, self.spec, self.block_size = module, spec, block_size
        dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[module.dtype]
        layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, dtype)
        pool = torch.full((num_blocks, layout.bytes_per_block), 255, dtype=torch.uint8).view(module.dtype)
        assert pool.isnan().all()
        heads, x, element = spec.num_kv_heads, layout.x, layout.element_size
        stride, per_layer = pool.stride(0), layout.bytes_per_layer // element
        half = layout.bytes_per_layer_k // element
        slab = spec.head_dim * block_size
        k_shape = (num_blocks, heads, spec.head_dim // x, block_size, x)
        v_shape = (num_blocks, heads, spec.head_dim, block_size)
        self.caches = [
            (
                pool.as_strided(k_shape, (stride, slab, block_size * x, x, 1), layer * per_layer),
                pool.as_strided(v_shape, (stride, slab, block_size, 1), layer * per_layer + half),
            )
            for layer in range(spec.num_layers)
        ]
        self.layers = layer_attention(spec, "cpu")

    def context(self, rows: Sequence[Row], **wanted: frozenset[int]) -> StepContext:
        tables, slots = [], []
        for row in rows:
            total = row.already + len(row.token_ids)
            tables.append([*row.mapped, (row.blocks, total, row.position, row.position)])
            slots += [
                row.blocks[i // self.block_size] * self.block_size + i % self.block_size
                for i in range(row.already, total)
            ]
        plan = AttentionPlan.build(tables, [row.positions() for row in rows])
        return StepContext(self.layers, self.caches, torch.tensor(slots), plan, **wanted)

    def step(
        self, rows: Sequence[Row], logit_rows: Tensor | None = None, all_logits: bool = True
    ) -> Tensor | None:
        """Runs the rows as one packed batch; logits of every token unless told otherwise."""
        token_ids = torch.tensor([token for row in rows for token in row.token_ids])
        positions = torch.tensor([position for row in rows for position in row.positions()])
        if logit_rows is None and all_logits:
            logit_rows = torch.arange(len(token_ids))
        return forward(self.module, token_ids, positions, self.context(rows), logit_rows)


@torch.inference_mode()
def own_logits(module: PreTrainedModel, token_ids: list[int], attention: str) -> Tensor:
    """transformers' own forward pass: [len(token_ids), vocab_size]."""
    before = module.config._attn_implementation
    module.set_attn_implementation(attention)
    try:
        logits: Tensor = module(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    finally:
        module.set_attn_implementation(before)
    return logits
