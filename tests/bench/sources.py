"""Which sources a kept measurement is from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_KERNEL = ("csrc/include", "csrc/cuda", "memkv/kernels/cuda.py")


def sources_digest() -> str:
    """Of everything that is installed."""
    return _digest(("memkv", "api", "migrations", "csrc", "pyproject.toml"))


def kernel_digest() -> str:
    """Of what a CUDA kernel's speed depends on."""
    return _digest(_KERNEL)


def engine_digest() -> str:
    """Of what an engine's speed on a GPU depends on."""
    return _digest((*_KERNEL, "memkv/kernels/plan.py", "memkv/engine", "memkv/model"))


def _digest(parts: Iterable[str]) -> str:
    """SHA-256 over names and bytes, 64 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        top = ROOT / part
        files = [top] if top.is_file() else sorted(top.rglob("*"))
        for file in files:
            if file.is_file() and file.suffix != ".pyc":
                digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
