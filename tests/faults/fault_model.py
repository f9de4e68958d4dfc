"""A model without weights whose keys and values prove themselves and whose answers name what it attended to.

A key or value is a hash of (token, stored position, layer, salt); the salt stands for the weights. Each chunk
of a test's documents holds notes, numbers of four digits after a blank, which are one token each. An answer
lists the notes that the prompt's chunks hold, in their order. If one slot holds anything but the
KV of its own token and position, the answer is WRONG.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memkv.config import Config, load_config
from memkv.engine.batch import Batch, VisibleTable
from memkv.engine.kv_cache import KVCache
from memkv.engine.model_runner import StepResult
from memkv.model.loader import LoadedModel
from memkv.model.support import LayerSpec, ModelSpec
from memkv.text.chunker import TextChunk, chunk_text
from memkv.text.tokenizer import TextTokenizer

WRONG = "!"
END, TURN, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_LAYERS, HEAD_DIM, DIM = 2, 8, 32
CHUNK_TOKENS = 64
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def document_text(notes: Sequence[int]) -> str:
    """One chunk for each note."""
    return "\n\n".join(f"Kept in note {note:04d} for whoever asks for it." for note in notes)


def question_for(note: int) -> str:
    return f"What is in note#{note:04d}?"


def notes_of(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r" (\d{4})", text)]


def fault_config(data_dir: str, url: str | None = None, **changes: object) -> Config:
    flags: dict[str, object] = {
        "store.data_dir": data_dir,
        "store.database_url": url or "",
        "store.scrub_hours": 0,
        "model.model": "fake",
        "model.embedder": "fake",
        "model.device": "cpu",
        "kv.dtype": "float32",
        "engine.pool_bytes": 8_000_000,
        "engine.threads": 1,
        "ingest.chunk_tokens": CHUNK_TOKENS,
        "query.max_tokens": 16,
        "server.port": 0,
        "log.level": "error",
    }
    return load_config({**flags, **changes}, env={})


@functools.cache
def fake_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and every blank with four digits behind it. One for all: it takes a while to make."""
    vocab = {token: index for index, token in enumerate((END, TURN, EOS))}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    merges, level = [], ["Ġ"]
    for _ in range(4):
        grown = []
        for head in level:
            for digit in "0123456789":
                merges.append((head, digit))
                grown.append(head + digit)
                vocab[head + digit] = len(vocab)
        level = grown
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (END, TURN, EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=EOS, pad_token=END, chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@functools.cache
def text_tokenizer() -> TextTokenizer:
    return TextTokenizer(fake_tokenizer())


def fake_model(salt: str = "") -> LoadedModel:
    """Models of different salts differ in their weights, and so in every key and value."""
    tokenizer = fake_tokenizer()
    spec = ModelSpec(
        architecture="Fake", num_layers=NUM_LAYERS, num_heads=1, num_kv_heads=1, head_dim=HEAD_DIM,
        vocab_size=len(tokenizer), max_context=4096,
        layers=(LayerSpec("attention", 0, 0.0, None),) * NUM_LAYERS,
        eos_token_ids=(tokenizer.convert_tokens_to_ids(EOS),), rope_description="none",
    )  # fmt: skip
    return LoadedModel(
        spec=spec, module=None, tokenizer=tokenizer,  # type: ignore[arg-type]  # nothing asks for the module
        weights_digest=hashlib.blake2b(salt.encode(), digest_size=32).hexdigest(), tokenizer_digest="70" * 32,
        name="fake", dtype="float32", device="cpu",
    )  # fmt: skip


class FakeEmbedder:
    """Vectors of hashed words: texts with a number in common are near each other."""

    name, dim, digest = "fake", DIM, "e0" * 32

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = np.zeros((len(texts), DIM), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            row[0] = 0.5
            for number in re.findall(r"\d{4}", text):
                row += np.random.default_rng(int(number)).standard_normal(DIM).astype(np.float32)
            row /= np.linalg.norm(row)
        return rows

    def embed_query(self, question: str) -> NDArray[np.float32]:
        return self.embed([question])[0]


class InProcessCutter:
    """Stands for `Cutter`: no piece of a life waits for a process to start."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def cut(self, text: str, title: str, max_tokens: int) -> list[TextChunk]:
        return chunk_text(text, title, self._tokenizer, max_tokens)

    def close(self) -> None:
        pass


class FakeRunner:
    """Stands for `ModelRunner`."""

    def __init__(self, model: LoadedModel, salt: str | None = None) -> None:
        self.device = torch.device("cpu")
        self.runs_ahead = False
        digest = hashlib.blake2b((model.weights_digest if salt is None else salt).encode(), digest_size=8)
        self._salt = np.uint64(int.from_bytes(digest.digest(), "little"))
        tokenizer = model.tokenizer
        self._vocab = len(tokenizer)
        self._turn, self._end = (tokenizer.convert_tokens_to_ids(token) for token in (TURN, EOS))
        self._wrong = tokenizer.convert_tokens_to_ids(WRONG)
        self._first_note = tokenizer.convert_tokens_to_ids("Ġ0000")
        self._opening = len(tokenizer.encode("assistant\n", add_special_tokens=False))

    def run(self, batch: Batch, kv_cache: KVCache) -> StepResult:
        size = kv_cache.layout.block_size
        positions = np.concatenate(batch.positions)
        block, offset = np.divmod(np.asarray(batch.slots), size)
        for layer in range(NUM_LAYERS):
            keys, values = self._kv(np.asarray(batch.token_ids), positions, layer)
            k_cache, v_cache = (view.numpy() for view in kv_cache.layer(layer))
            k_cache[block, 0, :, offset, :] = keys.reshape(len(keys), -1, k_cache.shape[-1])
            v_cache[block, 0, :, offset] = values
        masses = [torch.ones(look.num_entries) for look in batch.looks]
        if not batch.logit_rows:
            return StepResult(None, masses)
        logits = torch.zeros((len(batch.logit_rows), self._vocab))
        owners = np.repeat(np.arange(len(batch.positions)), [len(rows) for rows in batch.positions])
        for row, place in enumerate(batch.logit_rows):
            seen = self._seen(batch.tables[owners[place]], int(positions[place]), kv_cache)
            logits[row, self._wrong if seen is None else self._next(seen)] = 10.0
        return StepResult(logits, masses)

    def _kv(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], layer: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values, [n, HEAD_DIM] each; integers that a float32 holds. A key begins with its token."""
        with np.errstate(over="ignore"):
            mixed = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._salt
            mixed ^= positions.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F) + np.uint64(layer + 1)
            parts = np.arange(1, 2 * HEAD_DIM + 1, dtype=np.uint64) * np.uint64(0x165667B19E3779F9)
            found = mixed[:, None] * parts
            found ^= found >> np.uint64(29)
            found *= np.uint64(0xBF58476D1CE4E5B9)
        values = (found >> np.uint64(42)).astype(np.float32)
        values[:, 0] = tokens
        return values[:, :HEAD_DIM], values[:, HEAD_DIM:]

    def _seen(self, table: VisibleTable, last: int, kv_cache: KVCache) -> NDArray[np.int64] | None:
        """The tokens at positions 0 .. last by what their slots hold; None where one holds anything else."""
        size = kv_cache.layout.block_size
        blocks, offsets, stored = [], [], []
        count = 0
        for first, num_tokens, position, stored_position in np.asarray(table.segments).tolist():
            visible = np.arange(min(num_tokens, last + 1 - position))
            if position != count:
                return None
            count += len(visible)
            blocks.append(np.asarray(table.entries)[first + visible // size])
            offsets.append(visible % size)
            stored.append(stored_position + visible)
        block, offset, at = (np.concatenate(parts) for parts in (blocks, offsets, stored))
        k_cache = kv_cache.layer(0)[0].numpy()
        held = k_cache[block, 0, 0, offset, 0]
        if count != last + 1 or not (
            np.isfinite(held).all() and (held >= 0).all() and (held < self._vocab).all()
        ):
            return None
        tokens = held.astype(np.int64)
        for layer in range(NUM_LAYERS):
            keys, values = self._kv(tokens, at, layer)
            k_cache, v_cache = (view.numpy() for view in kv_cache.layer(layer))
            if not (
                np.array_equal(k_cache[block, 0, :, offset, :].reshape(count, -1), keys)
                and np.array_equal(v_cache[block, 0, :, offset], values)
            ):
                return None
        return tokens

    def _next(self, seen: NDArray[np.int64]) -> int:
        turn = int(np.flatnonzero(seen == self._turn)[-1])
        notes = seen[:turn][seen[:turn] >= self._first_note]
        said = len(seen) - (turn + 1 + self._opening)
        return int(notes[said]) if 0 <= said < len(notes) else int(self._end)


@contextmanager
def fake_models(salt: str = "") -> Iterator[None]:
    """Whatever opens a memory inside the block gets the fake model and embedder; everything else is real."""

    with (
        mock.patch("memkv.memory.parts.load_language_model", return_value=fake_model(salt)),
        mock.patch("memkv.memory.parts.load_embedder", return_value=FakeEmbedder()),
        mock.patch("memkv.memory.parts.TextTokenizer", return_value=text_tokenizer()),
        mock.patch("memkv.memory.parts.Cutter", InProcessCutter),
        mock.patch("memkv.engine.engine.ModelRunner", FakeRunner),
    ):
        yield
