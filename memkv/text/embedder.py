"""Texts to unit vectors, by a sentence-transformers model from a local directory.

Such a model reads a few hundred word pieces and silently ignores the rest. Here a longer text is read in
windows; its vector is the mean of theirs, each weighted by its word pieces, brought back to length 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers.utils import logging as transformers_logging

from memkv.errors import ModelDamaged, ModelNotFound, UnsupportedModel
from memkv.model.digest import weights_digest

Vectors = NDArray[np.float32]  # [num_texts, dim], each row of length 1


class Embedder:
    """Safe to use from several threads: it changes nothing after loading.

    Attributes:
        name: of the model's directory.
        dim: of its vectors.
        digest: 64 hex digits over everything that decides a vector: weights, vocabulary, configuration.
        max_tokens: word pieces of one window, with the model's own marks.
    """

    def __init__(self, model: SentenceTransformer, name: str, digest: str) -> None:
        self._model = model
        self.name = name
        self.digest = digest
        self.dim = int(model.get_embedding_dimension() or 0)
        self.max_tokens = int(model.max_seq_length or 0)
        self._tokenizer = Tokenizer.from_str(model.tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.max_tokens)  # what is cut off becomes the next window
        self._pad_id = int(model.tokenizer.pad_token_id or 0)
        self._prompts = {name: prompt or "" for name, prompt in model.prompts.items()}

    @classmethod
    def load(cls, directory: Path | str, *, device: str = "cpu") -> Embedder:
        """Loads a model directory; the network is never asked and no code from the directory runs.

        Raises:
            ModelNotFound: there is no such directory, or no model in it.
            UnsupportedModel: a model, but not one that embeds sentences.
            ModelDamaged: files are missing or broken.
        """
        path = Path(directory).expanduser()
        _check_modules(path)
        digest = embedder_digest(path)
        try:
            with _no_progress_bar():
                model = SentenceTransformer(
                    str(path),
                    device=device,
                    local_files_only=True,
                    trust_remote_code=False,
                    model_kwargs={"use_safetensors": True, "dtype": torch.float32},
                )
        except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
            raise ModelDamaged(
                f"the embedder in {path} cannot be loaded: {error}", hint="copy or install the model again"
            ) from error
        if not hasattr(getattr(model, "tokenizer", None), "backend_tokenizer") or not model.max_seq_length:
            raise UnsupportedModel(
                f"{path} is not an embedder of text with a fast tokenizer",
                hint="use a sentence-transformers model with a transformer in it",
            )
        model.eval()
        return cls(model, path.name, digest)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Vectors of documents' texts, in their order; a text has the same vector in any company.

        Computes on as many threads as torch has in the calling thread.
        """
        return self._embed([self._prompts.get("document", "") + text for text in texts])

    def embed_query(self, question: str) -> Vectors:
        """The vector [dim] of a question; models that tell questions from documents are told."""
        with _one_thread():
            row: Vectors = self._embed([self._prompts.get("query", "") + question])[0]
        return row

    def _embed(self, texts: list[str]) -> Vectors:
        sums = np.zeros((len(texts), self.dim), dtype=np.float64)
        windows = sorted(self._windows(texts), key=lambda window: len(window.ids), reverse=True)
        for batch in _batches(windows):
            for window, vector in zip(batch, self._forward(batch), strict=True):
                sums[window.text] += vector * window.weight
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        vectors: Vectors = (sums / np.maximum(lengths, 1e-12)).astype(np.float32)
        return vectors

    def _windows(self, texts: list[str]) -> Iterator[_Window]:
        for i, encoding in enumerate(self._tokenizer.encode_batch(texts)):
            for part in (encoding, *encoding.overflowing):
                weight = len(part.ids) - sum(part.special_tokens_mask)
                yield _Window(i, part.ids, part.type_ids, max(weight, 1))

    def _forward(self, batch: list[_Window]) -> NDArray[np.float64]:
        """Unit vectors [len(batch), dim] of the windows, padded to the longest."""
        longest = len(batch[0].ids)
        ids = torch.full((len(batch), longest), self._pad_id, dtype=torch.int64)
        types = torch.zeros_like(ids)
        mask = torch.zeros_like(ids)
        for row, window in enumerate(batch):
            size = len(window.ids)
            ids[row, :size] = torch.tensor(window.ids)
            types[row, :size] = torch.tensor(window.type_ids)
            mask[row, :size] = 1
        device = self._model.device
        features = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        if "token_type_ids" in self._model.tokenizer.model_input_names:
            features["token_type_ids"] = types.to(device)
        with torch.inference_mode():
            vectors = self._model(features)["sentence_embedding"]
        unit = torch.nn.functional.normalize(vectors.double(), dim=1)
        found: NDArray[np.float64] = unit.cpu().numpy()
        return found


@dataclass(frozen=True, slots=True)
class _Window:
    text: int  # index of the text that it is a part of
    ids: list[int]
    type_ids: list[int]
    weight: int  # its word pieces, without the model's own marks


_BATCH_TOKENS = 4_096


def _batches(windows: list[_Window]) -> Iterator[list[_Window]]:
    """Neighbours of a list that falls in length, as many as fit when padded to the first."""
    start = 0
    while start < len(windows):
        size = max(1, _BATCH_TOKENS // max(len(windows[start].ids), 1))
        yield windows[start : start + size]
        start += size


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps torch from starting a second team of threads beside the engine's: with more of them than cores,
    OpenMP's threads sleep between two operations, which costs the engine a third of its speed.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check_modules(path: Path) -> None:
    if not path.is_dir():
        raise ModelNotFound(f"there is no directory {path}", hint="run: memkv models install")
    modules = path / "modules.json"
    if not modules.is_file():
        known = "a model, but no embedder" if (path / "config.json").is_file() else "no embedder"
        error = UnsupportedModel if (path / "config.json").is_file() else ModelNotFound
        raise error(
            f"{path} holds {known}: modules.json is missing",
            hint="give --embedder a sentence-transformers model",
        )
    for module in _read_modules(modules):
        if not str(module.get("type", "")).startswith("sentence_transformers."):
            raise UnsupportedModel(
                f"{path} needs code of its own ({module.get('type')!r}), and memkv never runs such code",
                hint="use a model made of sentence-transformers' own modules",
            )


def _read_modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelDamaged(f"{path} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelDamaged(f"{path} is not a list of modules")
    return modules


def embedder_digest(path: Path) -> str:
    """Over the weights (cached by `weights_digest`) and every file of configuration and vocabulary."""
    files = sorted(
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, names in os.walk(path)
        for name in names
        if not name.startswith(".") and name not in _NOT_THE_MODEL
    )
    weights = [name for name in files if name.endswith(".safetensors")]
    if not weights:
        raise UnsupportedModel(
            f"{path} holds no weights as safetensors", hint="save the model with safetensors weights"
        )
    state = hashlib.blake2b(weights_digest(path, weights).encode(), digest_size=32)
    for name in files:
        if name.endswith((".json", ".txt", ".model")):
            content = hashlib.blake2b((path / name).read_bytes()).hexdigest()
            state.update(f"{name}\0{content}\n".encode())
    return state.hexdigest()


_NOT_THE_MODEL = frozenset({"memkv-install.json", "data_config.json", "train_script.json"})
