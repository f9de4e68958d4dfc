"""The seam to transformers: one attention function, called "memkv", for every supported model.

A batch is one packed row of tokens [1, total] with explicit positions and no transformers cache. In each
layer the function writes the new tokens' keys and values into their slots, then attends over the block
tables of the step. Which token belongs to which sequence, and what it sees, is in the step's plan alone.

The step's context reaches the function through a context variable: a keyword argument of our own would
reach it in most architectures, but some (StableLM, Nemotron) hand no keywords on to their attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from memkv.kernels import ops
from memkv.kernels.ops import AttentionPlan, AttentionResult, Rotation
from memkv.model.support import ModelSpec, RopeSpec

ATTENTION_NAME = "memkv"


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What the kernel is told of one layer, beside the step's plan."""

    rotation: Rotation | None
    window: int
    softcap: float


def layer_attention(spec: ModelSpec, device: torch.device | str) -> tuple[LayerAttention, ...]:
    """One entry per layer; layers that rotate alike share one Rotation, whose angles a plan computes once."""
    rotations: dict[RopeSpec, Rotation] = {}
    for layer in spec.layers:
        if layer.rope is not None and layer.rope not in rotations:
            inv_freq = torch.tensor(layer.rope.inv_freq, dtype=torch.float64, device=device)
            rotations[layer.rope] = Rotation(inv_freq, layer.rope.interleaved)
    return tuple(
        LayerAttention(None if layer.rope is None else rotations[layer.rope], layer.window, layer.softcap)
        for layer in spec.layers
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """The two operations the seam calls; `ops` unless a check asks for the reference."""

    write_kv: Callable[..., None] = ops.write_kv
    paged_attention: Callable[..., AttentionResult] = ops.paged_attention


@dataclass(slots=True)
class StepContext:
    """One step's view of the KV cache, and what the caller wants back from its layers.

    Attributes:
        layers: [num_layers], from `layer_attention`.
        caches: [num_layers] of (k_cache, v_cache).
        slots: int64 [total], where each new token's key and value go: block * block_size + offset.
        plan: rows of the batch, and the segments each sequence maps.
        block_mass_layers: layers whose per-block attention mass is wanted.
        lse_layers: layers whose log-sum-exp is wanted.
        block_mass: filled by the step: layer -> float32 [num_heads, num_entries].
        lse: filled by the step: layer -> float32 [total, num_heads].
    """

    layers: Sequence[LayerAttention]
    caches: Sequence[tuple[Tensor, Tensor]]
    slots: Tensor
    plan: AttentionPlan
    block_mass_layers: frozenset[int] = frozenset()
    lse_layers: frozenset[int] = frozenset()
    block_mass: dict[int, Tensor] = field(default_factory=dict)
    lse: dict[int, Tensor] = field(default_factory=dict)
    kernels: Kernels = Kernels()


@torch.inference_mode()
def forward(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor,
    context: StepContext,
    logit_rows: Tensor | None,
) -> Tensor | None:
    """Runs one step and returns the logits of the rows asked for.

    Args:
        model: loaded by `load_model`, or any model set to the attention "memkv".
        token_ids: int64 [total].
        positions: int64 [total], absolute; what the model rotates by.
        logit_rows: int64 [n], rows of the batch; None when no logits are wanted, then the head is not run.

    Returns:
        logits [n, vocab_size] in the model's dtype, scaled and capped as the architecture does; None without
        rows.
    """
    inputs = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}
    token = _current_step.set(context)
    try:
        if logit_rows is None:
            model.base_model(**inputs)
            return None
        logits: Tensor = model(**inputs, logits_to_keep=logit_rows).logits
        return logits[0]
    finally:
        _current_step.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, total, head_dim], rotated to the tokens' positions
    key: Tensor,  # [1, num_kv_heads, total, head_dim], rotated to the tokens' positions
    value: Tensor,  # [1, num_kv_heads, total, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer, inside `forward`.

    `ignored` are settings of other attention functions; `verification` has refused models that hand over one
    that matters.

    Returns:
        (output [1, total, num_heads, head_dim], None).
    """
    step = _current_step.get(None)
    assert step is not None, "bug: a model with the attention 'memkv' was run without a step"
    index = int(module.layer_idx)  # type: ignore[arg-type]  # every transformers attention module has one
    layer = step.layers[index]
    k_cache, v_cache = step.caches[index]
    kernels = step.kernels
    kernels.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), k_cache, v_cache, step.slots)
    result = kernels.paged_attention(
        query[0].transpose(0, 1),
        k_cache,
        v_cache,
        step.plan,
        rotation=layer.rotation,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=layer.window,
        softcap=layer.softcap,
        lse=index in step.lse_layers,
        block_mass=index in step.block_mass_layers,
    )
    if result.lse is not None:
        step.lse[index] = result.lse
    if result.block_mass is not None:
        step.block_mass[index] = result.block_mass
    return result.out[None], None


_current_step: ContextVar[StepContext | None] = ContextVar("memkv_step")


# No mask is registered under this name: visibility is in the plan. transformers makes none then; otherwise it
# would look into the positions for packed sequences, and wait for a GPU in every step.
AttentionInterface.register(ATTENTION_NAME, attend)
