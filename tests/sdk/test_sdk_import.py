"""`import memkv` stays light: what is heavy comes with what needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import memkv

HEAVY = (
    "torch",
    "transformers",
    "sqlalchemy",
    "litestar",
    "faiss",
    "uvicorn",
    "numpy",
    "sentence_transformers",
)


def run(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "statement", ["import memkv", "from memkv import MemKV, AsyncMemKV; MemKV(); AsyncMemKV()"]
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    found = run(f"{statement}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])")
    assert found.strip() == "[]"


def test_the_client_comes_late() -> None:
    assert run("import memkv, sys\nprint('httpx2' in sys.modules)").strip() == "False"


def test_it_is_quick() -> None:
    script = "import time; t = time.perf_counter(); import memkv; print(time.perf_counter() - t)"
    assert min(float(run(script)) for _ in range(3)) < 0.2


def test_names() -> None:
    assert set(memkv.__all__) <= set(dir(memkv))
    for name in memkv.__all__:
        assert getattr(memkv, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = memkv.no_such_name
    assert "docstring" not in (memkv.MemKV.__doc__ or "docstring")
