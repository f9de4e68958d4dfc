"""Which models memkv can serve, and why it refuses the others.

Mapping a stored chunk to another position turns the query instead of the keys. That is exact when the angles
of the model's RoPE are linear in position, and when nothing else in the model depends on absolute position.
`inspect_config` refuses by name, before weights are read, what is known to break this; whether a model that
passes really behaves is decided by measurement, in `verification`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from memkv.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotation of a layer's keys: pair i turns by `position * inv_freq[i]`.

    Attributes:
        inv_freq: [rotary_dim / 2]; dimensions of a head past rotary_dim are not rotated.
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + rotary_dim / 2).
    """

    inv_freq: tuple[float, ...]
    interleaved: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What paged attention must know of one layer.

    Attributes:
        kind: "attention", the only kind so far.
        window: a key is visible when key position > query position - window; 0 is no limit.
        softcap: scores become softcap * tanh(score / softcap); 0 is none.
        rope: None for a layer that does not rotate.
    """

    kind: str
    window: int
    softcap: float
    rope: RopeSpec | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as it was measured to behave.

    Attributes:
        architecture: transformers' class name.
        max_context: positions the model was made for.
        rope_description: canonical JSON of every layer's effective rotation; part of the fingerprint.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    layers: tuple[LayerSpec, ...]
    eos_token_ids: tuple[int, ...]
    rope_description: str


def inspect_config(config: PretrainedConfig) -> None:
    """Refuses what is known not to work, from the effective config alone.

    Raises:
        UnsupportedModel: names the architecture and the reason.
    """
    for rule in _RULES:
        reason = rule(config)
        if reason:
            raise refusal(config, reason)


def refusal(config: PretrainedConfig, reason: str) -> UnsupportedModel:
    """The error that says which model is refused and why."""
    names = getattr(config, "architectures", None) or [type(config).__name__]
    return UnsupportedModel(
        f"{names[0]} (model type {config.model_type!r}) is not supported: {reason}",
        hint="memkv serves decoder-only models with plain, linear, Llama-3 or YaRN RoPE in a layer, or none",
    )


# Refused by name: nothing in the config says it as plainly.
_LEARNED = "it has learned or absolute position embeddings, so a chunk cannot be mapped to another position"
_ALIBI = "it biases attention by distance (ALiBi), which the kernels do not implement"
_STATE = "it keeps a recurrent state (linear attention or a state-space layer) beside keys and values"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt", "xglm", "openai-gpt", "ctrl", "cpmant"), _LEARNED
    ),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(
        (
            *("mamba", "mamba2", "falcon_mamba", "falcon_h1", "rwkv", "xlstm", "recurrent_gemma", "jamba"),
            *("zamba", "zamba2", "bamba", "nemotron_h", "lfm2", "lfm2_moe", "kimi_linear", "qwen3_next"),
        ),
        _STATE,
    ),
    "gpt_oss": "its attention has sinks (learned logits in the softmax), which the kernels do not implement",
}

# layer_types entry -> reason; entries not listed here and not served are refused with their own name
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LAYER_TYPES: Mapping[str, str] = {
    "linear_attention": _STATE,
    "mamba": _STATE,
    "recurrent": _STATE,
    "conv": "it has convolution layers, whose state lies beside keys and values",
    "hybrid": _STATE,
    "chunked_attention": "it attends in fixed chunks of absolute position (chunked attention)",
}


def rope_parameters(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Every set of RoPE parameters of the config: one, or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]


def _encoder_decoder(config: PretrainedConfig) -> str | None:
    return "it is an encoder-decoder model" if getattr(config, "is_encoder_decoder", False) else None


def _multimodal(config: PretrainedConfig) -> str | None:
    parts = [name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None]
    if parts:
        return f"it is a multimodal or composite model ({', '.join(sorted(parts))})"
    if any("mrope_section" in parameters for parameters in rope_parameters(config)):
        return "it has multimodal RoPE (positions with several coordinates)"
    return None


def _by_name(config: PretrainedConfig) -> str | None:
    return _REFUSED.get(config.model_type)


def _alibi(config: PretrainedConfig) -> str | None:
    return _ALIBI if getattr(config, "alibi", False) or getattr(config, "use_alibi", False) else None


def _bidirectional(config: PretrainedConfig) -> str | None:
    masked_only = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    )
    if (
        masked_only
        or getattr(config, "use_bidirectional_attention", False)
        or not getattr(config, "is_causal", True)
    ):
        return "its attention is bidirectional"
    return None


def _not_causal_lm(config: PretrainedConfig) -> str | None:
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "transformers has no causal language model of this type"
    return None


def _latent_attention(config: PretrainedConfig) -> str | None:
    if getattr(config, "kv_lora_rank", None):
        return "it has multi-head latent attention (MLA), whose cache is not keys and values"
    return None


def _layer_types(config: PretrainedConfig) -> str | None:
    for name in ("layer_types", "layers_block_type"):
        for kind in getattr(config, name, None) or ():
            if kind not in _SERVED_LAYER_TYPES and kind != "attention":
                return _LAYER_TYPES.get(kind, f"it has layers of kind {kind!r}")
    return None


def _rope_of_length(config: PretrainedConfig) -> str | None:
    longest = getattr(config, "max_position_embeddings", None) or 0
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind == "dynamic":
            return "its RoPE is dynamic NTK: frequencies change with the length of the sequence"
        if kind == "longrope" and parameters.get("short_factor") != parameters.get("long_factor"):
            original = parameters.get("original_max_position_embeddings") or 0
            if longest > original:
                return f"its LongRoPE switches frequencies at {original} tokens"
    return None


_RULES: tuple[Callable[[PretrainedConfig], str | None], ...] = (
    _encoder_decoder,
    _by_name,
    _multimodal,
    _bidirectional,
    _not_causal_lm,
    _alibi,
    _latent_attention,
    _layer_types,
    _rope_of_length,
)
