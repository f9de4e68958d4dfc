"""Models of well-known shapes with random weights: as fast as the real ones, and as large."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from memkv.model.loader import LoadedModel
from memkv.model.verification import verify_effective

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072 + 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}


def random_model(shape: str, dtype: str, device: str) -> LoadedModel:
    """A model without a tokenizer, made on the device.

    Args:
        shape: one of `SHAPES`.

    Raises:
        UnsupportedModel, ModelDamaged: its logits do not prove that it is served exactly.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], bos_token_id=None, eos_token_id=None)
    with torch.device(device):
        module: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=getattr(torch, dtype)
        )
    module.train(False)
    module.requires_grad_(False)
    return LoadedModel(
        spec=verify_effective(module),
        module=module,
        tokenizer=None,  # type: ignore[arg-type]  # there is none, and an engine needs none
        weights_digest="",
        tokenizer_digest="",
        name=f"{shape}, random weights",
        dtype=dtype,
        device=device,
    )
