"""Which models are refused, with which reason: by name from the config, and by what they are seen to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, build_model, tiny_config, tiny_model
from transformers import AutoConfig, BertConfig, BertLMHeadModel, GPT2Config

from memkv.errors import ModelDamaged, UnsupportedModel
from memkv.model.attention import ATTENTION_NAME
from memkv.model.observation import observe
from memkv.model.support import LayerSpec, RopeSpec, inspect_config
from memkv.model.verification import _native_logits, _tokens, check_logits, verify_effective

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# Phi-3 keeps the original length beside the parameters.
_PHI3_LONGROPE = {"head_dim": None, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gpt2", {}, "learned or absolute position"),
        ("opt", {}, "learned or absolute position"),
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("falcon", {"alibi": True, "head_dim": None}, "ALiBi"),
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder"),
        ("bert", {}, "bidirectional"),
        ("mamba", {}, "recurrent state"),
        ("jamba", {}, "recurrent state"),
        ("qwen3_next", {}, "recurrent state"),
        ("lfm2", {}, "recurrent state"),
        ("deepseek_v2", {}, "MLA"),
        ("deepseek_v3", {}, "MLA"),
        ("gpt_oss", {}, "sinks"),
        ("llama4_text", {}, "chunked attention"),
        ("gemma3", {}, "multimodal"),
        ("qwen2_vl", {}, "multimodal"),
        ("clip", {}, "multimodal"),
        ("vit", {}, "no causal language model"),
        ("llama", {"rope_parameters": _DYNAMIC}, "dynamic NTK"),
        ("phi3", _PHI3_LONGROPE, "LongRoPE switches frequencies at 256 tokens"),
        ("qwen2", {"rope_parameters": _MROPE}, "multimodal RoPE"),
        ("llama", {"is_causal": False}, "bidirectional"),
    ],
)  # fmt: skip
def test_refused_by_name_before_weights_are_read(
    model_type: str, changes: dict[str, Any], reason: str
) -> None:
    config = tiny_config(model_type, **changes) if changes else AutoConfig.for_model(model_type)
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        inspect_config(config)
    assert repr(model_type) in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_the_inspection(family: str) -> None:
    model_type, changes = FAMILIES[family]
    inspect_config(tiny_config(model_type, **changes))


def test_a_longrope_that_never_switches_is_not_refused() -> None:
    inspect_config(tiny_config("phi3", **{**_PHI3_LONGROPE, "original_max_position_embeddings": 4096}))
    alike = {**_LONGROPE, "short_factor": [4.0] * 8}
    inspect_config(tiny_config("phi3", **{**_PHI3_LONGROPE, "rope_parameters": alike}))


class TestObservation:
    """The same refusals without the list of names: nothing unknown is served."""

    def test_learned_positions(self) -> None:
        config = GPT2Config(vocab_size=384, n_embd=64, n_layer=2, n_head=4, n_positions=512)
        with pytest.raises(UnsupportedModel, match="values depend on absolute position"):
            observe(build_model(config), 512)

    def test_dynamic_ntk_beyond_its_first_length(self) -> None:
        model = build_model(tiny_config("llama", rope_parameters=_DYNAMIC, max_position_embeddings=256))
        with pytest.raises(UnsupportedModel, match="not rotated by angles linear in position"):
            observe(model, 1024)

    def test_longrope_switch(self) -> None:
        model = build_model(tiny_config("phi3", **_PHI3_LONGROPE))
        with pytest.raises(UnsupportedModel, match="not rotated by angles linear in position"):
            observe(model, 4096)

    def test_chunked_attention(self) -> None:
        config = tiny_config(
            "llama4_text", attention_chunk_size=32, num_local_experts=2, num_experts_per_tok=1
        )
        with pytest.raises(UnsupportedModel, match="chunked attention"):
            observe(build_model(config), 256)

    def test_bidirectional_attention(self) -> None:
        config = tiny_config("llama", is_causal=False)
        with pytest.raises(UnsupportedModel, match="bidirectional"):
            observe(build_model(config), 256)

    def test_attention_sinks(self) -> None:
        config = tiny_config("gpt_oss", num_local_experts=2, num_experts_per_tok=1, rope_parameters=None)
        with pytest.raises(UnsupportedModel, match="attention sinks"):
            observe(build_model(config), 256)

    def test_attention_that_bypasses_the_interface(self) -> None:
        config = AutoConfig.for_model(
            "bloom", vocab_size=384, hidden_size=64, n_layer=2, n_head=4, num_hidden_layers=2
        )
        with pytest.raises(UnsupportedModel, match="does not go through transformers' AttentionInterface"):
            observe(build_model(config), 256)

    def test_latent_attention(self) -> None:
        config = tiny_config(
            "deepseek_v3",
            **{"head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 4},
        )
        with pytest.raises(UnsupportedModel, match="differ in size"):
            observe(build_model(config), 256)

    def test_layers_without_attention(self) -> None:
        config = tiny_config(
            "qwen3_next",
            **{"layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 2},
            num_experts_per_tok=1,
            **{"linear_num_value_heads": 2, "linear_num_key_heads": 2},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32},
        )
        with pytest.raises(UnsupportedModel, match="2 of its 4 layers call attention"):
            observe(build_model(config), 256)

    def test_an_encoder_used_as_a_decoder(self) -> None:
        config = BertConfig(
            vocab_size=384, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
        )
        with pytest.raises(UnsupportedModel, match="values depend on absolute position"):
            observe(BertLMHeadModel(config).eval(), 256)

    def test_layers_run_twice_or_sharing_a_cache_slot(self) -> None:
        model = tiny_model("llama")
        model.model.layers[2].self_attn.layer_idx = 1
        with pytest.raises(UnsupportedModel, match="3 of its 4 layers call attention"):
            observe(model, 256)


class TestEffectiveSpec:
    """What is measured, and that the measurement is taken from the model, not from the config."""

    @pytest.mark.parametrize(
        ("family", "windows"),
        [
            ("llama", [0, 0, 0, 0]),
            ("mistral", [12, 12, 12, 12]),
            ("qwen2", [0, 0, 0, 0]),
            ("qwen2-window", [0, 0, 12, 12]),
            ("gemma2", [12, 0, 12, 0]),
            ("gemma3", [12, 0, 12, 0]),
        ],
    )
    def test_windows(self, family: str, windows: list[int]) -> None:
        assert [layer.window for layer in verify_effective(tiny_model(family)).layers] == windows

    def test_a_window_longer_than_the_check(self) -> None:
        spec = verify_effective(tiny_model("mistral", sliding_window=1500))
        assert {layer.window for layer in spec.layers} == {1500}

    def test_a_window_of_the_whole_context_is_none(self) -> None:
        spec = verify_effective(tiny_model("mistral", sliding_window=4096))
        assert {layer.window for layer in spec.layers} == {0}

    def test_softcap(self) -> None:
        assert {layer.softcap for layer in verify_effective(tiny_model("gemma2")).layers} == {5.0}

    def test_layers_without_rope(self) -> None:
        layers = verify_effective(tiny_model("smollm3")).layers
        assert [layer.rope is None for layer in layers] == [False, False, False, True]
        layers = verify_effective(tiny_model("cohere2")).layers
        assert [layer.rope is None for layer in layers] == [False, True, False, True]

    @pytest.mark.parametrize(
        ("family", "interleaved"), [("llama", False), ("cohere", True), ("glm", True), ("ernie4.5", True)]
    )
    def test_pairing(self, family: str, interleaved: bool) -> None:
        ropes = {layer.rope for layer in verify_effective(tiny_model(family)).layers}
        assert {rope.interleaved for rope in ropes if rope} == {interleaved}

    def test_a_rotation_the_other_way_round(self) -> None:
        rope = verify_effective(tiny_model("nanochat")).layers[0].rope
        assert rope is not None and rope.inv_freq[0] == -1.0

    def test_partial_rotation(self) -> None:
        rope = verify_effective(tiny_model("phi3-partial")).layers[0].rope
        assert rope is not None and len(rope.inv_freq) == 4

    def test_one_rotation_for_local_and_one_for_global_layers(self) -> None:
        spec = verify_effective(tiny_model("gemma3"))
        local, everywhere = spec.layers[0].rope, spec.layers[1].rope
        assert local is not None and everywhere is not None
        assert everywhere.inv_freq[0] == pytest.approx(local.inv_freq[0] / 8)
        assert '"layers":[0,1,0,1]' in spec.rope_description

    def test_scaled_frequencies_are_the_effective_ones(self) -> None:
        plain = verify_effective(tiny_model("llama"))
        scaled = verify_effective(tiny_model("llama-llama3"))
        assert plain.layers[0].rope != scaled.layers[0].rope
        assert plain.rope_description != scaled.rope_description

    def test_frequencies_changed_behind_the_config(self) -> None:
        model = tiny_model("llama")
        model.model.rotary_emb.inv_freq.mul_(0.5)
        rope = verify_effective(model).layers[0].rope
        assert rope is not None and rope.inv_freq[0] == 0.5

    def test_the_model_is_left_on_memkv(self) -> None:
        model = tiny_model("llama")
        verify_effective(model)
        assert model.config._attn_implementation == ATTENTION_NAME


def _wrong(layer: LayerSpec, what: str) -> LayerSpec:
    assert layer.rope is not None
    if what == "frequencies":
        return dataclasses.replace(
            layer, rope=RopeSpec(tuple(0.97 * f for f in layer.rope.inv_freq), layer.rope.interleaved)
        )
    if what == "pairing":
        return dataclasses.replace(layer, rope=RopeSpec(layer.rope.inv_freq, not layer.rope.interleaved))
    if what == "no rotation":
        return dataclasses.replace(layer, rope=None)
    return dataclasses.replace(
        layer, **{"window": {"window": layer.window + 1}, "softcap": {"softcap": 0.0}}[what]
    )


@pytest.mark.parametrize("what", ["frequencies", "pairing", "no rotation", "window", "softcap"])
def test_the_check_of_logits_notices_one_wrong_layer(what: str) -> None:
    model = tiny_model("gemma2")
    model.set_attn_implementation("eager")
    native = _native_logits(model, _tokens(model.config))
    spec = verify_effective(model)
    check_logits(model, spec, native)
    layers = (_wrong(spec.layers[0], what), *spec.layers[1:])
    with pytest.raises(UnsupportedModel, match="its logits differ from its own"):
        check_logits(model, dataclasses.replace(spec, layers=layers), native)


def test_weights_that_are_not_finite() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(ModelDamaged, match="not finite"):
        verify_effective(model)
