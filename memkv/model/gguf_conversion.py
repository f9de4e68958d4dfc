"""Turns a llama-architecture GGUF file into the directory form that transformers loads.

Weights are dequantised and written as float16 safetensors: half the disk and read time of float32, and the
rounding (2^-12 of a weight) is far below the step of a 4-bit quantiser. The tokenizer is rebuilt from the
file's own vocabulary with the pre-tokenizer that `tokenizer.ggml.pre` names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from memkv.errors import ModelDamaged, UnsupportedModel

_CONTROL_TOKEN = 3

# GGUF name within a block -> transformers name within a layer
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# `tokenizer.ggml.pre` -> digits are split one by one before the byte-level pattern
_SPLITS_DIGITS = {"smollm": True, "gpt-2": False}


def convert_gguf(gguf_path: Path, directory: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer files to `directory`.

    Raises:
        UnsupportedModel: the file's architecture or tokenizer is not one that is converted here.
        ModelDamaged: the file is not a readable GGUF file.
    """
    try:
        reader = gguf.GGUFReader(gguf_path)
    except (ValueError, IndexError, OSError) as error:
        raise ModelDamaged(f"{gguf_path.name} is not a readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights = _weights(reader, config)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(fields, directory)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    if fields["general.architecture"] != "llama" or "llama.rope.scaling.type" in fields:
        raise UnsupportedModel(
            f"GGUF architecture {fields['general.architecture']!r} is not converted",
            hint="give a directory with safetensors weights instead",
        )
    heads = fields["llama.attention.head_count"]
    head_dim = fields["llama.embedding_length"] // heads
    if fields["llama.rope.dimension_count"] != head_dim:
        raise UnsupportedModel("GGUF files with partial rotary embeddings are not converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shortest_float32(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": fields["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float16",
    }


def _shortest_float32(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _weights(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = _rotate_half_order(values, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            values = _rotate_half_order(values, config["num_key_value_heads"])
        weights[_transformers_name(tensor.name)] = torch.from_numpy(values.astype(np.float16))
    return weights


def _transformers_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    block, number, part, suffix = (name.split(".") + [""] * 4)[:4]
    if block != "blk" or part not in _BLOCK_TENSORS:
        raise UnsupportedModel(f"GGUF tensor {name!r} is not one of a plain llama model")
    return f"model.layers.{number}.{_BLOCK_TENSORS[part]}.{suffix}"


def _rotate_half_order(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Undoes GGUF's row order: pairs (2i, 2i + 1) of a head become (i, i + head_dim / 2).

    values: [num_heads * head_dim, hidden]
    """
    rows, hidden = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    kind, pre = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != "gpt2" or pre not in _SPLITS_DIGITS or fields.get("tokenizer.ggml.add_bos_token"):
        raise UnsupportedModel(f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not converted")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if _SPLITS_DIGITS[pre]:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
