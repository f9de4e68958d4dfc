"""The real `Memory` that the API's and the SDK's tests share: SmolLM2 and MiniLM over a fresh store."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memkv.config import Config, load_config

if TYPE_CHECKING:
    from memkv.memory import Memory

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def memory(smollm2: Path, minilm: Path, pytestconfig: pytest.Config) -> Memory:
    """Opened once in a session, whichever tests ask for it; each test uses collections of its own."""
    return _open(str(smollm2), str(minilm), pytestconfig)


@pytest.fixture
def collection() -> str:
    """A name that no other test uses."""
    return f"collection-{next(_numbers)}"


def config_for(model: str, embedder: str, data_dir: str) -> Config:
    flags = {
        "store.data_dir": data_dir,
        "model.model": model,
        "model.embedder": embedder,
        "engine.pool_bytes": 100_000_000,
        "engine.host_share": 0.0,
        "ingest.chunk_tokens": 64,
        "query.max_tokens": 4,
        "server.port": 0,
    }
    return load_config(flags, env={})


@functools.cache
def _open(model: str, embedder: str, pytestconfig: pytest.Config) -> Memory:
    from memkv.memory import Memory

    folder = tempfile.TemporaryDirectory(prefix="memkv-served-")
    memory = Memory.open(config_for(model, embedder, folder.name))
    pytestconfig.add_cleanup(folder.cleanup)
    pytestconfig.add_cleanup(memory.close)  # cleanups run last in, first out
    return memory
