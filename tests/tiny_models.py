"""Tiny random models of the supported families: real architectures of transformers, a few thousand weights.

Weights are drawn larger than an initialiser would draw them, so that attention is far from uniform and a
wrong position, window or soft-cap moves the logits by much more than rounding does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 384
END_OF_TURN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * 2
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_NO_HEAD_DIM = {"head_dim": None}  # the family derives it from hidden_size

# family -> (model_type, what differs from _SHAPE); a value of None leaves the key out
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "ministral": ("ministral", {"sliding_window": 12, "layer_types": _LOCAL_GLOBAL}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0], **_NO_HEAD_DIM}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 4.0,
            **_NO_HEAD_DIM,
        },
    ),
    "olmo2": ("olmo2", _NO_HEAD_DIM),
    "olmo3": ("olmo3", {"sliding_window": 12, "layer_types": _LOCAL_GLOBAL, **_NO_HEAD_DIM}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 12,
            "layer_types": _LOCAL_GLOBAL,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 12,
            "layer_types": _LOCAL_GLOBAL,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 12, **_NO_HEAD_DIM}),
    "phi3-partial": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            **_NO_HEAD_DIM,
        },
    ),
    "phi": (
        "phi",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            **_NO_HEAD_DIM,
        },
    ),
    "stablelm": ("stablelm", _NO_HEAD_DIM),
    "starcoder2": ("starcoder2", {"sliding_window": 12, **_NO_HEAD_DIM}),
    "cohere": ("cohere", {"logit_scale": 0.5, "use_qk_norm": True, **_NO_HEAD_DIM}),
    "cohere2": (
        "cohere2",
        {"logit_scale": 0.5, "sliding_window": 12, "layer_types": _LOCAL_GLOBAL},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "exaone4": ("exaone4", {"sliding_window": 12, "layer_types": _LOCAL_GLOBAL}),
    "helium": ("helium", {}),
    "nemotron": ("nemotron", {}),
    "ernie4.5": ("ernie4_5", {}),
    "seed-oss": ("seed_oss", {}),
    "arcee": ("arcee", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, **_NO_HEAD_DIM}),
    "nanochat": ("nanochat", _NO_HEAD_DIM),  # rotates the other way round
    "apertus": ("apertus", _NO_HEAD_DIM),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": None, **_NO_HEAD_DIM}),
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small config of `model_type`; `changes` override the shape, and None removes a key."""
    values = {key: value for key, value in {**_SHAPE, **changes}.items() if value is not None}
    return AutoConfig.for_model(model_type, **values)


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random float32 model of the family on the CPU; the same weights in every run."""
    model_type, own = FAMILIES[family]
    return build_model(tiny_config(model_type, **{**own, **changes}))


def build_model(config: Any) -> PreTrainedModel:
    """A random float32 model with attention far from uniform."""
    torch.manual_seed(20)
    # torch's own attention leaves soft-caps out without a word.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                gain = (
                    2.0
                    if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value"))
                    else 1.0
                )
                weight.copy_(torch.randn_like(weight) * gain / weight.shape[-1] ** 0.5)
    return model


def save_tiny_model(family: str, directory: Path, **changes: Any) -> Path:
    """Saves the family's model and a tokenizer in transformers' directory form."""
    tiny_model(family, **changes).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges, special tokens and a chat template; ids are below VOCAB_SIZE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", END_OF_TURN]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        show_progress=False,
    )
    text = "the memory keeps what the model has read of a document, and the question maps it into the answer "
    tokenizer.train_from_iterator([text] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[2],
        pad_token=special[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
