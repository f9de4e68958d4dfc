"""Unit vectors that do not depend on company, long texts whole, and errors for what is no embedder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer

from memkv.errors import ModelDamaged, ModelNotFound, UnsupportedModel
from memkv.text.embedder import Embedder

TEXTS = [
    "A cat sits on the mat.",
    "",
    "Stock prices fell sharply on Monday.",
    "word " * 900,
    "猫がいる。",
    "a" * 5000,
]


@pytest.fixture(scope="module")
def embedder(minilm: Path) -> Embedder:
    return Embedder.load(minilm)


def test_vectors_have_length_one_and_do_not_depend_on_company(embedder: Embedder) -> None:
    together = embedder.embed(TEXTS)
    assert together.dtype == np.float32
    assert together.shape == (len(TEXTS), embedder.dim) == (6, 384)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(embedder.embed([text])[0], vector, atol=1e-5)
    np.testing.assert_array_equal(embedder.embed(TEXTS), together)
    assert embedder.embed([]).shape == (0, 384)


def test_short_texts_have_the_vectors_of_sentence_transformers(embedder: Embedder, minilm: Path) -> None:
    short = [TEXTS[0], TEXTS[2], TEXTS[4]]
    peer = SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    np.testing.assert_allclose(
        embedder.embed(short), peer.encode(short, normalize_embeddings=True), atol=1e-5
    )
    np.testing.assert_allclose(embedder.embed_query(TEXTS[0]), embedder.embed(TEXTS[:1])[0], atol=1e-6)


def test_a_long_text_is_the_mean_of_its_windows(embedder: Embedder) -> None:
    stocks = "Stock prices fell sharply on Monday. " * 35  # 7 pieces each
    window = embedder.max_tokens - 2
    first = "the cat sat on the mat " * 42 + "the cat"  # 254: exactly one window
    assert len(first.split()) == window
    whole = embedder.embed([f"{first} {stocks}"])[0]
    alone = embedder.embed([first, stocks])
    mean = alone[0] * window + alone[1] * 245
    np.testing.assert_allclose(whole, mean / np.linalg.norm(mean), atol=1e-5)
    query = embedder.embed_query("What happened to stock prices?")
    assert query @ whole > query @ alone[0] + 0.1  # what stands behind the first window counts


def test_neighbours_in_meaning_are_neighbours_in_space(embedder: Embedder) -> None:
    near, far = embedder.embed(
        ["A kitten rests on a rug.", "Quarterly revenue grew."]
    ) @ embedder.embed_query(TEXTS[0])
    assert near > far + 0.3


def test_the_digest_follows_all_that_decides_a_vector(
    minilm: Path, tmp_path: Path, embedder: Embedder
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(minilm, copy)
    assert Embedder.load(copy).digest == embedder.digest
    assert Embedder.load(copy).name == "copy"
    (copy / "README.md").write_text("other words")
    assert Embedder.load(copy).digest == embedder.digest
    settings = copy / "sentence_bert_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_seq_length": 128}))
    shorter = Embedder.load(copy)
    assert shorter.digest != embedder.digest
    assert shorter.max_tokens == 128
    weights = load_file(copy / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name] + np.float32(1e-3)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert Embedder.load(copy).digest not in (embedder.digest, shorter.digest)


def test_what_is_no_embedder_is_refused(minilm: Path, smollm2: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        Embedder.load(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match="is missing"):
        Embedder.load(tmp_path)
    with pytest.raises(UnsupportedModel, match="no embedder"):
        Embedder.load(smollm2)
    foreign = tmp_path / "foreign"
    shutil.copytree(minilm, foreign, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UnsupportedModel, match="safetensors"):
        Embedder.load(foreign)
    modules = json.loads((foreign / "modules.json").read_text())
    modules[0]["type"] = "custom_code.Transformer"
    (foreign / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModel, match="never runs such code"):
        Embedder.load(foreign)
    (foreign / "modules.json").write_text("{not json")
    with pytest.raises(ModelDamaged):
        Embedder.load(foreign)


def test_broken_weights_are_named_damaged(minilm: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(minilm, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelDamaged) as caught:
        Embedder.load(broken)
    assert caught.value.hint
