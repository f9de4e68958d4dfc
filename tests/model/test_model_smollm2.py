"""SmolLM2 itself: installed, loaded, and as good through memkv's attention as through transformers' own."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, own_logits

from memkv.model.loader import LoadedModel, load_model

PROMPTS = [
    "The capital of France is",
    "A paged cache keeps the keys and values of a sequence in blocks of a fixed number of tokens, so that",
    "1, 2, 3, 5, 8, 13, 21,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n",
    "Ein Satz auf Deutsch, une phrase en français, 日本語の文, and back to English:",
]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def paged(smollm2_model: LoadedModel) -> PagedModel:
    return PagedModel(smollm2_model.module, smollm2_model.spec)


def encode(loaded: LoadedModel, text: str) -> list[int]:
    ids: list[int] = loaded.tokenizer(text).input_ids
    return ids


def test_packed_prompts_have_transformers_logits(smollm2_model: LoadedModel, paged: PagedModel) -> None:
    prompts = [encode(smollm2_model, text) for text in PROMPTS]
    rows = [Row(ids, 0, [3 * i, 3 * i + 1, 3 * i + 2]) for i, ids in enumerate(prompts)]
    logits = paged.step(rows)
    assert logits is not None
    for text, ids, ours in zip(PROMPTS, prompts, logits.split([len(ids) for ids in prompts]), strict=True):
        difference = float((ours - own_logits(smollm2_model.module, ids, "sdpa")).abs().max())
        assert difference <= TOLERANCE, f"{text!r}: {difference}"


def test_a_mapped_chunk_has_the_logits_of_the_whole_prompt(
    smollm2_model: LoadedModel, paged: PagedModel
) -> None:
    chunk = encode(smollm2_model, "Notes. " + PROMPTS[1] + " many sequences may share them.")
    question = encode(smollm2_model, " What do sequences share?")
    own = own_logits(smollm2_model.module, chunk + question, "sdpa")[len(chunk) :]
    paged.step([Row(chunk, 500, [40, 41])], all_logits=False)
    mapped = [([40, 41], len(chunk), 0, 500)]
    ours = paged.step([Row(question, len(chunk), [42], mapped=mapped)])
    assert ours is not None
    assert float((ours - own).abs().max()) <= TOLERANCE
    wrong = [([40, 41], len(chunk), 0, 490)]
    ours = paged.step([Row(question, len(chunk), [42], mapped=wrong)])
    assert ours is not None
    assert float((ours - own).abs().max()) > 100 * TOLERANCE


def test_greedy_tokens_are_transformers_own(smollm2_model: LoadedModel, paged: PagedModel) -> None:
    prompt = encode(smollm2_model, PROMPTS[4])
    row = Row(prompt, 0, [50, 51, 52])
    written: list[int] = []
    while len(written) < 16:
        last = torch.tensor([len(row.token_ids) - 1])
        logits = paged.step([row], last)
        assert logits is not None
        written.append(int(logits[0].argmax()))
        row = Row([written[-1]], 0, row.blocks, already=row.already + len(row.token_ids))
    own = own_logits(smollm2_model.module, prompt + written, "sdpa").argmax(-1)
    assert written == own[len(prompt) - 1 : -1].tolist()


def test_the_conversion_kept_what_the_model_knows(smollm2_model: LoadedModel, paged: PagedModel) -> None:
    ids = encode(smollm2_model, PROMPTS[0])
    logits = paged.step([Row(ids, 0, [60])], torch.tensor([len(ids) - 1]))
    assert logits is not None
    assert smollm2_model.tokenizer.decode(logits[0].argmax()) == " Paris"


def test_its_tokenizer(smollm2_model: LoadedModel) -> None:
    tokenizer = smollm2_model.tokenizer
    assert tokenizer.convert_ids_to_tokens(encode(smollm2_model, "in  2025\n\n1.")) == [
        *["in", "ĠĠ", "2", "0", "2", "5", "ĊĊ", "1", "."]
    ]
    assert encode(smollm2_model, "<|im_end|>") == [2] == list(smollm2_model.spec.eos_token_ids)
    for text in PROMPTS:
        assert tokenizer.decode(encode(smollm2_model, text)) == text
    assert "<|im_start|>assistant" in tokenizer.chat_template


def test_it_loads_quickly_and_to_the_same_digests(smollm2: Path, smollm2_model: LoadedModel) -> None:
    gc.freeze()  # what other tests left is not looked through meanwhile
    start = time.process_time()
    try:
        again = load_model("smollm2-135m-instruct", models_dir=smollm2.parent)
        took = time.process_time() - start
    finally:
        gc.unfreeze()
    assert took < 6.0  # 1.3 s on a free core
    assert again.weights_digest == smollm2_model.weights_digest
    assert again.tokenizer_digest == smollm2_model.tokenizer_digest
    assert again.spec == smollm2_model.spec
    assert (again.name, smollm2_model.name) == ("smollm2-135m-instruct", "smollm2-135m-instruct")
