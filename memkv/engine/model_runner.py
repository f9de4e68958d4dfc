"""A batch in, logits out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from memkv.engine.batch import Batch
from memkv.engine.kv_cache import KVCache
from memkv.kernels import AttentionPlan
from memkv.model.attention import StepContext, forward, layer_attention
from memkv.model.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a pass returns.

    Attributes:
        logits: [len(logit_rows), vocab_size]; None without rows.
        masses: of each look of the batch, float32 [num_entries] on the CPU, summed over heads and layers.
    """

    logits: Tensor | None
    masses: list[Tensor] = field(default_factory=list)


class ModelRunner:
    """Runs one model on its device."""

    def __init__(self, model: LoadedModel) -> None:
        self._module = model.module
        self._layers = layer_attention(model.spec, model.device)
        self.device = torch.device(model.device)

    def run(self, batch: Batch, kv_cache: KVCache) -> StepResult:
        """One pass: writes the batch's keys and values.

        Raises:
            KernelArgumentError: a block id or slot is outside the cache.
        """
        plan = AttentionPlan.build(batch.tables, batch.positions, self.device)
        plan.validate(kv_cache.num_blocks, kv_cache.layout.block_size)
        num_layers = kv_cache.layout.num_layers
        looks = [(look, look.request.layer_indices(num_layers)) for look in batch.looks]
        context = StepContext(
            layers=self._layers,
            caches=[kv_cache.layer(index) for index in range(num_layers)],
            slots=self._tensor(batch.slots),
            plan=plan,
            block_mass_layers=frozenset(layer for _, layers in looks for layer in layers),
        )
        positions = [position for of_owner in batch.positions for position in of_owner]
        rows = self._tensor(batch.logit_rows) if batch.logit_rows else None
        ids = self._tensor(batch.token_ids)
        logits = forward(self._module, ids, self._tensor(positions), context, rows)
        masses = []
        for look, layers in looks:
            entries = slice(look.first_entry, look.first_entry + look.num_entries)
            of_layers = torch.stack([context.block_mass[layer][:, entries].sum(dim=0) for layer in layers])
            masses.append(of_layers.sum(dim=0).cpu())
        return StepResult(logits, masses)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
