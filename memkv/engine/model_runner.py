"""A batch in, logits out."""

from __future__ import annotations

import torch
from torch import Tensor

from memkv.engine.batch import Batch
from memkv.engine.kv_cache import KVCache
from memkv.kernels import AttentionPlan
from memkv.model.attention import StepContext, forward, layer_attention
from memkv.model.loader import LoadedModel


class ModelRunner:
    """Runs one model on its device."""

    def __init__(self, model: LoadedModel) -> None:
        self._module = model.module
        self._layers = layer_attention(model.spec, model.device)
        self.device = torch.device(model.device)

    def run(self, batch: Batch, kv_cache: KVCache) -> Tensor | None:
        """One pass: writes the batch's keys and values, returns logits [len(logit_rows), vocab_size] or None.

        Raises:
            KernelArgumentError: a block id or slot is outside the cache.
        """
        plan = AttentionPlan.build(batch.tables, batch.positions, self.device)
        plan.validate(kv_cache.num_blocks, kv_cache.layout.block_size)
        context = StepContext(
            layers=self._layers,
            caches=[kv_cache.layer(index) for index in range(kv_cache.layout.num_layers)],
            slots=self._tensor(batch.slots),
            plan=plan,
        )
        positions = [position for of_owner in batch.positions for position in of_owner]
        rows = self._tensor(batch.logit_rows) if batch.logit_rows else None
        return forward(self._module, self._tensor(batch.token_ids), self._tensor(positions), context, rows)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
