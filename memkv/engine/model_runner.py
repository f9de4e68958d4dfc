"""A batch in, logits out."""

from __future__ import annotations

import numpy as np
import torch

from memkv.engine.batch import Batch
from memkv.engine.kv_cache import KVCache
from memkv.engine.staging import to_device
from memkv.engine.step_graphs import StepGraphs
from memkv.engine.step_tensors import MassRequest, StepResult, StepTensors
from memkv.kernels import AttentionPlan
from memkv.model.attention import StepContext, forward, layer_attention
from memkv.model.loader import LoadedModel

__all__ = ["ModelRunner", "StepResult"]


class ModelRunner:
    """Runs one model on its device; on a GPU, passes of few tokens as CUDA graphs."""

    def __init__(self, model: LoadedModel) -> None:
        self._module = model.module
        self._layers = layer_attention(model.spec, model.device)
        self.runs_ahead = torch.device(model.device).type == "cuda"  # nobody waits for a pass to end
        self.device = torch.empty(0, device=model.device).device  # "cuda" has no index, its tensors have
        self._graphs = StepGraphs(self._pass, model.spec.num_heads) if self.device.type == "cuda" else None

    def run(self, batch: Batch, kv_cache: KVCache) -> StepResult:
        """One pass: writes the batch's keys and values.

        Raises:
            KernelArgumentError: a block id or slot is outside the cache.
        """
        host = batch.plan()
        if self._graphs is not None:
            found = self._graphs.run(batch, host, kv_cache)
            if found is not None:
                return found
        rows = np.array(batch.logit_rows, dtype=np.int64)
        of_tokens = (batch.token_ids, np.concatenate(batch.positions), batch.slots, batch.sources, rows)
        ids, positions, slots, sources, logit_rows, *planned = to_device(
            [*of_tokens, *host.values()], self.device
        )
        fed = torch.cat(batch.fed) if batch.fed else ids[:0]
        plan = AttentionPlan.of_arrays(host, dict(zip(host, planned, strict=True)))
        plan.validate(kv_cache.num_blocks, kv_cache.layout.block_size)
        num_layers = kv_cache.layout.num_layers
        masses = [MassRequest(look.entries, look.request.layer_indices(num_layers)) for look in batch.looks]
        return self._pass(
            StepTensors(ids, positions, slots, sources, fed, logit_rows, plan, masses), kv_cache
        )

    def _pass(self, step: StepTensors, kv_cache: KVCache) -> StepResult:
        context = StepContext(
            layers=self._layers,
            caches=[kv_cache.layer(index) for index in range(kv_cache.layout.num_layers)],
            slots=step.slots,
            plan=step.plan,
            block_mass_layers=frozenset(layer for wanted in step.masses for layer in wanted.layers),
        )
        rows = step.logit_rows if len(step.logit_rows) else None
        ids = step.token_ids
        if len(step.fed):  # of logits that are no numbers a negative one was sampled
            ids = ids.where(step.sources < 0, step.fed[step.sources.clamp_min(0)].clamp_min(0))
        logits = forward(self._module, ids, step.positions, context, rows)
        masses = []
        for wanted in step.masses:
            of_layers = [context.block_mass[layer][:, wanted.entries].sum(dim=0) for layer in wanted.layers]
            masses.append(torch.stack(of_layers).sum(dim=0))
        return StepResult(logits, masses)
