"""The only place where store meets engine: ingest, query, forget.

`Memory` is imported when it is first used: `StoredMemory`, which needs no model, comes without torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkv.memory.memory import Memory as Memory
    from memkv.memory.stored import StoredMemory as StoredMemory

__all__ = ["Memory", "StoredMemory"]

_LAZY = {"Memory": "memkv.memory.memory", "StoredMemory": "memkv.memory.stored"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'memkv.memory' has no attribute {name!r}")
