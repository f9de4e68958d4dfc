"""Where a measurement was made: versions, CPU and threads."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from memkv import __version__
from memkv.kernels.ops import num_threads

_PACKAGES = ("torch", "transformers", "tokenizers", "sentence-transformers", "faiss-cpu", "faiss-gpu-cu12")


def versions() -> dict[str, str]:
    """Version of memkv, Python and each package that took part."""
    found = {"memkv": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's own name, with how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_model_name()}, {cores} {'core' if cores == 1 else 'cores'}"


def threads() -> dict[str, int]:
    """Threads of torch and of memkv's kernels."""
    return {"torch": torch.get_num_threads(), "kernels": num_threads()}


def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
