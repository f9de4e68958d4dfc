"""`MemKV.local`: a memory in this process, opened and closed by the client."""

from __future__ import annotations

from pathlib import Path

import pytest

from memkv import MemKV
from memkv.config import Config
from memkv.errors import BadRequestError, StoreLocked


def test_it_opens_keeps_and_closes(
    tmp_path: Path, smollm2: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMKV_ENGINE__POOL_BYTES", "50M")
    lines: list[str] = []
    for opened in range(2):
        with MemKV.local(
            tmp_path / "data", str(smollm2), embedder=str(minilm), on_progress=lines.append
        ) as client:
            client.collections.get_or_create("c")
            if opened == 0:
                client.documents.create("c", text="The keeper was Amalia Reis.", external_id="k")
                with pytest.raises(StoreLocked):
                    MemKV.local(tmp_path / "data", str(smollm2), embedder=str(minilm))
            answer = client.query("Who was the keeper?", collection="c", max_tokens=2, policy="map")
            assert answer.chunks[0].external_id == "k"
    assert lines


def test_models_are_named_once() -> None:
    with pytest.raises(BadRequestError):
        MemKV.local(model="m", config=Config())
