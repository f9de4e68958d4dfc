"""Proves on load that a model gives, through memkv's attention, the logits of its own forward pass.

No list of architectures decides what is served. A model that `support` does not refuse by name is observed
layer by layer (`observation`), then run twice on a few tokens: as transformers does, and as memkv would,
two sequences in one packed row, one of them over keys that were stored at other positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from memkv.errors import ModelDamaged
from memkv.kernels import reference
from memkv.kernels.ops import AttentionPlan
from memkv.model.attention import ATTENTION_NAME, Kernels, StepContext, forward, layer_attention
from memkv.model.observation import observe
from memkv.model.support import LayerSpec, ModelSpec, RopeSpec, inspect_config, refusal

_BLOCK_SIZE = 8
_CHUNK, _TAIL, _OTHER = 13, 11, 7  # tokens: stored elsewhere, behind it, and of a second sequence
_SMALL = 500_000_000  # parameters
_FARTHEST_STORE = 1000  # position at which the relocated chunk is stored

# Root mean square of the difference, relative to that of the logits. A wrong rotation differs by tenths.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def verify_effective(model: PreTrainedModel, eos_token_ids: Sequence[int] = ()) -> ModelSpec:
    """Measures what the model does and returns its spec; leaves the model set to the attention "memkv".

    Raises:
        UnsupportedModel: the model cannot be served exactly; the reason is named.
        ModelDamaged: its logits are not finite.
    """
    inspect_config(model.config)
    try:
        with _few_threads(model):
            return _verify(model, eos_token_ids)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as e:
        raise refusal(
            model.config, f"its forward pass fails with memkv's attention ({type(e).__name__}: {e})"
        ) from e


def check_logits(model: PreTrainedModel, spec: ModelSpec, native: tuple[Tensor, Tensor]) -> None:
    """Compares memkv's logits under `spec` with `native`, those of the model's own forward pass.

    Raises:
        UnsupportedModel: they differ by more than rounding.
    """
    tokens = _tokens(model.config)
    packed, relocated = _memkv_logits(model, spec, tokens)
    tolerance = _TOLERANCE[model.dtype]
    for what, ours, own in (
        ("a packed batch", packed, native[1]),
        ("a chunk mapped at another position", relocated, native[0][_CHUNK:]),
    ):
        difference = _relative_difference(ours, own)
        if not difference <= tolerance:
            raise refusal(
                model.config,
                f"with {what} its logits differ from its own by {difference:.2g} (allowed {tolerance:g})",
            )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The check's input: one sequence (a chunk and its tail), and another that shares the packed row."""

    sequence: Tensor  # int64 [_CHUNK + _TAIL]
    other: Tensor  # int64 [_OTHER]


def _verify(model: PreTrainedModel, eos_token_ids: Sequence[int]) -> ModelSpec:
    config = model.config
    # transformers' plain attention: others may drop what they do not implement, as SDPA does a soft-cap
    model.set_attn_implementation("eager")
    native = _native_logits(model, _tokens(config))
    max_context = _max_context(config)
    layers = observe(model, max_context)
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) != 1:
        raise refusal(config, f"its layers differ in heads or head dim: {sorted(shapes)}")
    num_heads, num_kv_heads, head_dim = shapes.pop()
    spec = ModelSpec(
        architecture=type(model).__name__,
        num_layers=len(layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=native[0].shape[-1],
        max_context=max_context,
        layers=tuple(layer.spec for layer in layers),
        eos_token_ids=tuple(eos_token_ids),
        rope_description=_describe_rope([layer.spec for layer in layers]),
    )
    model.set_attn_implementation(ATTENTION_NAME)
    check_logits(model, spec, native)
    return spec


def _tokens(config: PretrainedConfig) -> _Tokens:
    generator = torch.Generator().manual_seed(20)
    vocabulary = min(config.vocab_size, 1 << 20)
    drawn = torch.randint(vocabulary, (_CHUNK + _TAIL + _OTHER,), generator=generator)
    return _Tokens(drawn[: _CHUNK + _TAIL], drawn[_CHUNK + _TAIL :])


def _max_context(config: PretrainedConfig) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 64:
        raise refusal(
            config, f"its config does not say how long its context is (max_position_embeddings: {length})"
        )
    return length


@torch.inference_mode()
def _native_logits(model: PreTrainedModel, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    logits = tuple(
        model(input_ids=ids[None].to(device), use_cache=False).logits[0].float()
        for ids in (tokens.sequence, tokens.other)
    )
    if not all(bool(part.isfinite().all()) for part in logits):
        raise ModelDamaged(
            f"{type(model).__name__} gives logits that are not finite in {model.dtype}",
            hint="the weights are damaged, or the model overflows in this dtype: try --dtype float32",
        )
    return logits[0], logits[1]


def _memkv_logits(model: PreTrainedModel, spec: ModelSpec, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    """Logits of `other`, packed beside the chunk, and of the tail behind the relocated chunk."""
    device = next(model.parameters()).device
    stored = min(_FARTHEST_STORE, spec.max_context // 2)
    chunk_blocks, other_blocks, tail_blocks = [5, 2], [4], [0, 3]
    check = _Check(model, spec, device)
    chunk_positions = list(range(stored, stored + _CHUNK))
    packed = check.step(
        token_ids=torch.cat((tokens.sequence[:_CHUNK], tokens.other)),
        tables=[[(chunk_blocks, _CHUNK, stored, stored)], [(other_blocks, _OTHER, 0, 0)]],
        positions=[chunk_positions, list(range(_OTHER))],
        written=[chunk_blocks, other_blocks],
    )
    tail = check.step(
        token_ids=tokens.sequence[_CHUNK:],
        tables=[[(chunk_blocks, _CHUNK, 0, stored), (tail_blocks, _TAIL, _CHUNK, _CHUNK)]],
        positions=[list(range(_CHUNK, _CHUNK + _TAIL))],
        written=[tail_blocks],
    )
    return packed[_CHUNK:], tail


@contextmanager
def _few_threads(model: PreTrainedModel) -> Iterator[None]:
    """One thread for a small model: on busy cores, waiting for each other costs more."""
    threads = torch.get_num_threads()
    if sum(weight.numel() for weight in model.parameters()) < _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Check:
    """A KV cache of six blocks, and steps over it with the reference kernels."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec, device: torch.device) -> None:
        self._model, self._device = model, device
        self._layers = layer_attention(spec, device)
        x = 16 // model.dtype.itemsize
        k_shape = (6, spec.num_kv_heads, spec.head_dim // x, _BLOCK_SIZE, x)
        v_shape = (6, spec.num_kv_heads, spec.head_dim, _BLOCK_SIZE)
        self._caches = [
            (
                torch.full(k_shape, torch.nan, dtype=model.dtype, device=device),
                torch.full(v_shape, torch.nan, dtype=model.dtype, device=device),
            )
            for _ in spec.layers
        ]

    def step(
        self,
        token_ids: Tensor,
        tables: list[list[tuple[list[int], int, int, int]]],
        positions: list[list[int]],
        written: list[list[int]],
    ) -> Tensor:
        """Runs one packed row and returns all its logits; sequence i writes into the blocks written[i]."""
        slots = [
            blocks[i // _BLOCK_SIZE] * _BLOCK_SIZE + i % _BLOCK_SIZE
            for blocks, rows in zip(written, positions, strict=True)
            for i in range(len(rows))
        ]
        context = StepContext(
            layers=self._layers,
            caches=self._caches,
            slots=torch.tensor(slots, device=self._device),
            plan=AttentionPlan.build(tables, positions, self._device),
            kernels=Kernels(reference.write_kv, reference.paged_attention),
        )
        flat = torch.tensor([position for rows in positions for position in rows], device=self._device)
        rows = torch.arange(len(flat), device=self._device)
        logits = forward(self._model, token_ids.to(self._device), flat, context, rows)
        assert logits is not None, "bug: logits were asked for"
        return logits.float()


def _relative_difference(ours: Tensor, own: Tensor) -> float:
    if ours.shape != own.shape:
        return float("inf")
    spread = own - own.mean(dim=-1, keepdim=True)
    return float((ours - own).pow(2).mean().sqrt() / spread.pow(2).mean().sqrt().clamp_min(1e-30))


def _describe_rope(layers: Sequence[LayerSpec]) -> str:
    """Canonical JSON: the distinct rotations, and which of them each layer has."""
    ropes: dict[RopeSpec | None, int] = {}
    numbers = [ropes.setdefault(layer.rope, len(ropes)) for layer in layers]
    described: list[dict[str, Any] | None] = [
        None if rope is None else {"interleaved": rope.interleaved, "inv_freq": list(rope.inv_freq)}
        for rope in ropes
    ]
    return json.dumps({"layers": numbers, "ropes": described}, separators=(",", ":"), sort_keys=True)
