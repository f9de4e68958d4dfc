"""`memkv bench compare` at a small shape: what it reports is consistent, and is what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from memkv.bench.bandwidth import last_level_cache_bytes, machine_read_gbs
from memkv.bench.compare import Comparison, Shape, run_comparison
from memkv.bench.documents import text_of
from memkv.config import load_config
from memkv.errors import ModelError
from memkv.text.tokenizer import TextTokenizer

SHAPE = Shape(
    chunks=3,
    chunk_tokens=96,
    question_tokens=24,
    block_size=8,
    rounds=1,
    ingest_chunks=4,
    decode_tokens=4,
    read_bytes=1_000_000,
)


@pytest.fixture(scope="module")
def found(minilm: Path, tiny_model_dir: Callable[[str], Path]) -> Comparison:
    flags = {
        "model.model": str(tiny_model_dir("llama")),
        "model.embedder": str(minilm),
        "engine.pool_bytes": "64M",
        "engine.threads": 1,
    }
    return run_comparison(load_config(flags, env={}), SHAPE)


def test_each_way_computes_what_its_name_says(found: Comparison) -> None:
    off, exact, head, mapped = (found.prefilled_tokens[way] for way in ("off", "exact", "head", "map"))
    assert off == found.prompt_tokens
    assert exact == mapped + 2 * 96  # the first chunk is mapped
    assert head == mapped + 2 * 8  # one block of each later chunk
    assert mapped >= 24  # the question, and the template behind it
    cached = found.cached_tokens
    assert all(cached[way] + computed == off for way, computed in found.prefilled_tokens.items())


def test_every_figure_is_there(found: Comparison) -> None:
    assert set(found.ttft_ms) == set(found.speedup) == {"off", "exact", "head", "map"}
    assert all(value > 0 for value in found.ttft_ms.values())
    assert found.speedup["off"] == 1.0
    assert found.speedup["map"] == found.ttft_ms["off"] / found.ttft_ms["map"]
    for rate in (
        found.kernel_read_gbs,
        found.machine_read_gbs,
        found.ingest_tokens_per_s,
        found.model_tokens_per_s,
        found.decode_tokens_per_s,
    ):
        assert 0 < rate < 1e7
    assert found.threads == {"torch": 1, "kernels": 1}
    assert found.versions["memkv"]
    assert found.cpu
    assert found.shape == SHAPE


@pytest.mark.parametrize("num_tokens", [8, 32, 97, 256])
def test_texts_have_the_tokens_they_are_asked_for(smollm2: Path, num_tokens: int) -> None:
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(smollm2))
    texts = [text_of(num_tokens, lambda text: len(tokenizer.encode(text)), seed) for seed in range(5)]
    assert {len(tokenizer.encode(text)) for text in texts} == {num_tokens}
    assert len(set(texts)) == 5


def test_a_text_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(ModelError):
        text_of(33, lambda text: 2 * len(text.split()), 1)


def test_the_machine_reads_at_a_plausible_rate() -> None:
    assert last_level_cache_bytes() >= 1_000_000
    assert 0.5 < machine_read_gbs(64_000_000, 2) < 5_000
