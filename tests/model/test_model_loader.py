"""Loading: what is read, what is refused, and what makes two models the same."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from memkv.errors import ConfigError, MemKVError, ModelDamaged, ModelNotFound, UnsupportedModel
from memkv.model import digest
from memkv.model.loader import LoadedModel, load_model


@pytest.fixture
def model_dir(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir("llama"), tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weight-hashes.json"


def edit_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def test_a_directory_loads_without_the_network(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a local model touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    loaded = load_model(str(model_dir))
    spec = loaded.spec
    assert (loaded.name, loaded.dtype, loaded.device) == ("model", "float32", "cpu")
    assert (spec.architecture, spec.num_layers, spec.num_heads) == ("LlamaForCausalLM", 4, 4)
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.max_context) == (2, 16, 384, 4096)
    assert len(loaded.weights_digest) == len(loaded.tokenizer_digest) == 64
    assert not loaded.module.training
    assert not any(weight.requires_grad for weight in loaded.module.parameters())


def test_ids_that_end_an_answer_come_from_all_three_places(model_dir: Path) -> None:
    edit_json(model_dir / "config.json", eos_token_id=7)
    edit_json(model_dir / "generation_config.json", eos_token_id=[9, 7])
    assert load_model(str(model_dir)).spec.eos_token_ids == (2, 7, 9)


def _no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _config_cut_short(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "lla')


def _config_is_a_list(directory: Path) -> None:
    (directory / "config.json").write_text("[1]")


def _config_out_of_range(directory: Path) -> None:
    edit_json(directory / "config.json", num_attention_heads=0)


def _config_of_another_type(directory: Path) -> None:
    edit_json(directory / "config.json", hidden_size="large")


def _code_of_its_own(directory: Path) -> None:
    edit_json(directory / "config.json", model_type="my_llama", auto_map={"AutoConfig": "config.My"})


def _no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _pickled_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _weights_cut_short(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 2000)


def _weights_are_text(directory: Path) -> None:
    (directory / "model.safetensors").write_text("not a tensor " * 50)


def _a_tensor_missing(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.2.self_attn.k_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _a_tensor_of_another_shape(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _a_shard_missing(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    names = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _a_shard_elsewhere(directory: Path) -> None:
    names = {"lm_head.weight": "../other/model.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _tokenizer_cut_short(directory: Path) -> None:
    os.truncate(directory / "tokenizer.json", 500)


def _tokenizer_of_no_kind(directory: Path) -> None:
    edit_json(directory / "tokenizer.json", model={"type": "BPE", "vocab": 5, "merges": "x"})


def _no_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


def _embeddings_of_another_tokenizer(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:100].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    edit_json(directory / "config.json", vocab_size=100)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (_no_config, ModelNotFound, "config.json is missing"),
        (_config_cut_short, ModelDamaged, "config.json cannot be read"),
        (_config_is_a_list, ModelDamaged, "not a JSON object"),
        (_config_out_of_range, ModelDamaged, "config.json cannot be used"),
        (_config_of_another_type, ModelDamaged, "config.json cannot be used"),
        (_code_of_its_own, UnsupportedModel, "never runs such code"),
        (_no_weights, ModelNotFound, "model.safetensors is missing"),
        (_pickled_weights, UnsupportedModel, "safetensors only"),
        (_weights_cut_short, ModelDamaged, "cut short"),
        (_weights_are_text, ModelDamaged, "not a safetensors file"),
        (_a_tensor_missing, ModelDamaged, "lacks 1 tensors of the model, model.layers.2.self_attn.k_proj"),
        (_a_tensor_of_another_shape, ModelDamaged, "weights in .* cannot be loaded"),
        (_a_shard_missing, ModelDamaged, "missing"),
        (_a_shard_elsewhere, ModelDamaged, "outside the directory"),
        (_tokenizer_cut_short, ModelDamaged, "tokenizer in .* cannot be loaded"),
        (_tokenizer_of_no_kind, ModelDamaged, "tokenizer in .* cannot be loaded"),
        (_no_tokenizer, ModelDamaged, "tokenizer in .* cannot be loaded"),
        (_embeddings_of_another_tokenizer, ModelDamaged, "the tokenizer in .* has 318 tokens, the model 100"),
    ],
)
def test_a_spoilt_model_is_an_error_that_says_why(
    spoil: Callable[[Path], None], error: type[MemKVError], words: str, model_dir: Path
) -> None:
    spoil(model_dir)
    with pytest.raises(error, match=words):
        load_model(str(model_dir))


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {"dtype": "int8"}, {"device": "toaster"}])
def test_settings_that_cannot_be_had(settings: dict[str, str], model_dir: Path) -> None:
    with pytest.raises(ConfigError):
        load_model(str(model_dir), **settings)  # type: ignore[arg-type]


def test_an_unsupported_model_is_refused_before_its_weights_are_read(model_dir: Path) -> None:
    edit_json(model_dir / "config.json", model_type="bloom", architectures=["BloomForCausalLM"])
    _weights_cut_short(model_dir)
    with pytest.raises(UnsupportedModel, match=r"BloomForCausalLM .*ALiBi"):
        load_model(str(model_dir))


def test_shards_load_like_one_file(model_dir: Path, load_tiny: Callable[[str], LoadedModel]) -> None:
    whole = load_tiny("llama").module
    whole.save_pretrained(model_dir / "shards", max_shard_size="50KB")
    for path in model_dir.glob("tokenizer*"):
        shutil.copy(path, model_dir / "shards")
    shards = list((model_dir / "shards").glob("*.safetensors"))
    assert len(shards) > 2
    loaded = load_model(str(model_dir / "shards"))
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(loaded.module.state_dict()[name], weight, rtol=0, atol=0)


class TestWeightsDigest:
    def test_one_changed_weight_changes_it(self, model_dir: Path, cache: Path) -> None:
        before = digest.weights_digest(model_dir, ["model.safetensors"], cache)
        path = model_dir / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert digest.weights_digest(model_dir, ["model.safetensors"], cache) != before

    @pytest.mark.parametrize(
        ("changes", "differs"),
        [
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}, True),
            ({"rms_norm_eps": 1e-3}, True),
            ({"some_new_field": 3}, True),
            ({"transformers_version": "9.9"}, False),
            ({"eos_token_id": 5, "dtype": "bfloat16", "use_cache": False}, False),
        ],
    )
    def test_of_the_config_what_matters(
        self, changes: dict[str, Any], differs: bool, model_dir: Path, cache: Path
    ) -> None:
        before = digest.weights_digest(model_dir, ["model.safetensors"], cache)
        edit_json(model_dir / "config.json", **changes)
        assert (digest.weights_digest(model_dir, ["model.safetensors"], cache) != before) is differs

    def test_a_file_is_read_once(self, model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read = _count_reads(monkeypatch)
        _settle(model_dir / "model.safetensors")
        first = digest.weights_digest(model_dir, ["model.safetensors"], cache)
        assert digest.weights_digest(model_dir, ["model.safetensors"], cache) == first
        assert len(read) == 1
        cache.write_text('{"damaged')
        assert digest.weights_digest(model_dir, ["model.safetensors"], cache) == first
        assert len(read) == 2

    def test_a_change_that_keeps_size_and_mtime_is_seen(self, model_dir: Path, cache: Path) -> None:
        path = model_dir / "model.safetensors"
        _settle(path)
        before = digest.weights_digest(model_dir, ["model.safetensors"], cache)
        stat = path.stat()
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.stat().st_mtime_ns == stat.st_mtime_ns
        assert digest.weights_digest(model_dir, ["model.safetensors"], cache) != before

    def test_a_file_written_just_now_is_not_remembered(
        self, model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = _count_reads(monkeypatch)
        (model_dir / "model.safetensors").touch()
        for _ in range(2):
            digest.weights_digest(model_dir, ["model.safetensors"], cache)
        assert len(read) == 2

    def test_a_cache_that_cannot_be_written_is_no_error(self, model_dir: Path) -> None:
        _settle(model_dir / "model.safetensors")
        blocked = model_dir / "config.json" / "cache.json"
        assert len(digest.weights_digest(model_dir, ["model.safetensors"], blocked)) == 64

    def test_a_missing_file(self, model_dir: Path, cache: Path) -> None:
        with pytest.raises(ModelDamaged, match="cannot read"):
            digest.weights_digest(model_dir, ["absent.safetensors"], cache)


def _settle(path: Path) -> None:
    past = time.time_ns() - 60_000_000_000
    os.utime(path, ns=(past, past))


def _count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read: list[int] = []
    content_hash = digest._content_hash

    def counting(descriptor: int) -> str:
        read.append(descriptor)
        return content_hash(descriptor)

    monkeypatch.setattr(digest, "_content_hash", counting)
    return read


class TestTokenizerDigest:
    def test_the_same_for_a_copy(self, model_dir: Path, load_tiny: Callable[[str], LoadedModel]) -> None:
        assert load_model(str(model_dir)).tokenizer_digest == load_tiny("llama").tokenizer_digest

    def test_another_vocabulary_template_or_special_token(
        self, model_dir: Path, load_tiny: Callable[[str], LoadedModel]
    ) -> None:
        digests = {load_tiny("llama").tokenizer_digest}
        (model_dir / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        digests.add(load_model(str(model_dir)).tokenizer_digest)
        edit_json(model_dir / "tokenizer_config.json", eos_token="<|im_start|>")
        digests.add(load_model(str(model_dir)).tokenizer_digest)
        rules = json.loads((model_dir / "tokenizer.json").read_text())
        rules["model"]["merges"].pop()
        (model_dir / "tokenizer.json").write_text(json.dumps(rules))
        digests.add(load_model(str(model_dir)).tokenizer_digest)
        assert len(digests) == 4


def test_the_weights_are_the_files(model_dir: Path) -> None:
    loaded = load_model(str(model_dir))
    with safe_open(model_dir / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            torch.testing.assert_close(
                loaded.module.state_dict()[name], file.get_tensor(name), rtol=0, atol=0
            )


def test_on_a_cpu_linear_weights_lie_by_column(model_dir: Path) -> None:
    loaded = load_model(str(model_dir))
    layer = loaded.module.base_model.layers[0].mlp.up_proj
    assert layer.weight.t().is_contiguous() and not layer.weight.is_contiguous()
    assert loaded.module.get_input_embeddings().weight.is_contiguous()
    plain = load_file(model_dir / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(layer.weight, plain)
