"""A batch in, logits out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from memkv.engine.batch import Batch
from memkv.engine.kv_cache import KVCache
from memkv.engine.staging import to_device
from memkv.kernels import AttentionPlan
from memkv.model.attention import StepContext, forward, layer_attention
from memkv.model.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a pass returns.

    Attributes:
        logits: [len(logit_rows), vocab_size]; None without rows.
        masses: of each look of the batch, float32 [num_entries], summed over heads and layers.
    """

    logits: Tensor | None
    masses: list[Tensor] = field(default_factory=list)


class ModelRunner:
    """Runs one model on its device."""

    def __init__(self, model: LoadedModel) -> None:
        self._module = model.module
        self._layers = layer_attention(model.spec, model.device)
        self.device = torch.empty(0, device=model.device).device  # "cuda" has no index, its tensors have

    def run(self, batch: Batch, kv_cache: KVCache) -> StepResult:
        """One pass: writes the batch's keys and values.

        Raises:
            KernelArgumentError: a block id or slot is outside the cache.
        """
        host = batch.plan()
        rows = np.array(batch.logit_rows, dtype=np.int64)
        of_tokens = (batch.token_ids, np.concatenate(batch.positions), batch.slots, rows)
        ids, positions, slots, logit_rows, *planned = to_device([*of_tokens, *host.values()], self.device)
        plan = AttentionPlan.of_arrays(host, dict(zip(host, planned, strict=True)))
        plan.validate(kv_cache.num_blocks, kv_cache.layout.block_size)
        num_layers = kv_cache.layout.num_layers
        looks = [(look, look.request.layer_indices(num_layers)) for look in batch.looks]
        context = StepContext(
            layers=self._layers,
            caches=[kv_cache.layer(index) for index in range(num_layers)],
            slots=slots,
            plan=plan,
            block_mass_layers=frozenset(layer for _, layers in looks for layer in layers),
        )
        logits = forward(self._module, ids, positions, context, logit_rows if len(rows) else None)
        masses = []
        for look, layers in looks:
            entries = slice(look.first_entry, look.first_entry + look.num_entries)
            of_layers = torch.stack([context.block_mass[layer][:, entries].sum(dim=0) for layer in layers])
            masses.append(of_layers.sum(dim=0))
        return StepResult(logits, masses)
