"""Which sources a kept measurement is from."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("memkv", "api", "migrations", "csrc", "pyproject.toml")


def sources_digest() -> str:
    """SHA-256 over the names and bytes of everything that is installed, 64 hex digits."""
    digest = hashlib.sha256()
    for part in _PARTS:
        top = ROOT / part
        files = [top] if top.is_file() else sorted(top.rglob("*"))
        for file in files:
            if file.is_file() and file.suffix != ".pyc":
                digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def kernel_digest() -> str:
    """SHA-256 over the sources that a CUDA kernel's speed depends on, 64 hex digits."""
    digest = hashlib.sha256()
    for part in ("csrc/include", "csrc/cuda", "memkv/kernels/cuda.py"):
        top = ROOT / part
        for file in [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file()):
            digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
