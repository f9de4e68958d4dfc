"""What can never run is refused before it waits for anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from memkv.config import EngineConfig
from memkv.errors import ContextTooLong
from memkv.kv.layout import KVLayout
from memkv.model.support import ModelSpec

_CPU_POOL_BYTES = 2_000_000_000
_GPU_SHARE = 0.8  # the rest is for what a step computes with
_MOST_HOST_BYTES = 16 << 30  # taken unasked: pinning takes seconds
_CONTAINER_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


def require_context(spec: ModelSpec, prompt_tokens: int, max_tokens: int) -> None:
    """Raises `ContextTooLong` where prompt and longest answer exceed what the model was made for."""
    if prompt_tokens + max_tokens > spec.max_context:
        raise ContextTooLong(
            f"{prompt_tokens} prompt tokens and up to {max_tokens} answer tokens exceed the model's context "
            f"of {spec.max_context}",
            hint="retrieve fewer chunks (top_k), ask a shorter question or lower max_tokens",
        )


def require_blocks(layout: KVLayout, needed: int, total: int) -> None:
    """Raises `ContextTooLong` where the whole pool is too small."""
    if needed > total:
        raise ContextTooLong(
            f"the request needs {needed} blocks of {layout.block_size} tokens, the whole pool has {total}",
            hint=f"raise engine.pool_bytes to at least {needed * layout.bytes_per_block}, retrieve fewer "
            "chunks (top_k) or lower max_tokens",
        )


def pool_bytes(config: EngineConfig, devices: Sequence[str]) -> int:
    """Of the pool of each of several engines, whose models are loaded, one on each of these devices."""
    gpus = _gpus(devices)
    if config.pool_bytes or not gpus:
        return config.pool_bytes or _CPU_POOL_BYTES
    free = {device: torch.cuda.mem_get_info(device)[0] for device in gpus}
    return min(int(_GPU_SHARE * free[device] / gpus.count(device)) for device in gpus)


def host_bytes(config: EngineConfig, devices: Sequence[str]) -> int:
    """Of the host pool of each of these engines."""
    gpus = _gpus(devices)
    if config.host_bytes or not gpus:
        return config.host_bytes
    each = min(int(config.host_share * free_memory()), _MOST_HOST_BYTES) // len(gpus)
    return 1 << (each.bit_length() - 1) if each else 0  # torch pins powers of two


def free_memory(root: Path = Path("/")) -> int:
    """Bytes of this machine that the system could give, as far as a container's limit allows."""
    lines = _read(root / "proc/meminfo").splitlines()
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limits = [int(text) for name in _CONTAINER_LIMITS if (text := _read(root / name).strip()).isdigit()]
    return min([*available, *limits], default=0)


def _read(path: Path) -> str:
    """Nothing where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _gpus(devices: Sequence[str]) -> list[str]:
    return [device for device in devices if torch.device(device).type == "cuda"]
