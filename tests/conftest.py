"""Fixtures that every part of the suite shares: real models, real data, tiny random models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from memkv.model.loader import LoadedModel

# No test reaches a hub; set before transformers is imported, which reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct, installed once per machine."""
    from memkv.model.install import install

    return install("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2_model(smollm2: Path) -> LoadedModel:
    """SmolLM2, loaded in float32 on the CPU. Shared by the whole session: do not change it."""
    from memkv.model.loader import load_model

    return load_model(str(smollm2))


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of the embedder all-MiniLM-L6-v2, installed once per machine."""
    from memkv.model.install import install

    return install("all-minilm-l6-v2")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real documents and questions that $MEMKV_TEST_DATA names."""
    folder = os.environ.get("MEMKV_TEST_DATA")
    if not folder:
        pytest.skip("MEMKV_TEST_DATA is not set: no real documents to test with")
    path = Path(folder)
    assert path.is_dir(), f"MEMKV_TEST_DATA={folder} is not a directory"
    return path


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> directory of a tiny random model with a byte-level tokenizer and a chat template.

    The families are the keys of `tiny_models.FAMILIES`; "llama" is the plainest. The same family gives the
    same weights in every run. Vocabulary: 384 (256 bytes, merges, special tokens); context 4,096.
    """
    from tiny_models import save_tiny_model

    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_model(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return directory


@pytest.fixture(scope="session")
def load_tiny(tiny_model_dir: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """family -> the tiny model of `tiny_model_dir`, in float32. Shared by the session: do not change it."""
    from memkv.model.loader import load_model

    loaded: dict[str, LoadedModel] = {}

    def load(family: str) -> LoadedModel:
        if family not in loaded:
            loaded[family] = load_model(str(tiny_model_dir(family)))
        return loaded[family]

    return load
