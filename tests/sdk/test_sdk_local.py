"""`MemKV.local`: a memory in this process, opened and closed by the client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memkv import MemKV
from memkv.config import Config
from memkv.errors import BadRequestError, StoreLocked


def test_it_opens_keeps_and_closes(
    tmp_path: Path, tiny_model_dir: Callable[[str], Path], minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMKV_ENGINE__POOL_BYTES", "20M")
    path, model, embedder = tmp_path / "data", str(tiny_model_dir("llama")), str(minilm)
    lines: list[str] = []
    with MemKV.local(path, model, embedder=embedder, on_progress=lines.append) as client:
        client.collections.create("c")
        client.documents.create("c", text="The keeper was Amalia Reis.", external_id="k")
        with pytest.raises(StoreLocked):
            MemKV.local(path, model, embedder=embedder)
    assert lines
    with MemKV.local(path, model, embedder=embedder) as client:
        answer = client.query("Who was the keeper?", collection="c", max_tokens=2, policy="map")
    assert answer.chunks[0].external_id == "k"


def test_models_are_named_once() -> None:
    with pytest.raises(BadRequestError):
        MemKV.local(model="m", config=Config())
