"""memkv: a RAG memory server with paged KV reuse.

`MemKV` and `AsyncMemKV` are imported when they are first used, so that `import memkv` stays quick.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkv.sdk.async_client import AsyncMemKV as AsyncMemKV
    from memkv.sdk.client import MemKV as MemKV

__version__ = "0.1.0"
__all__ = ["AsyncMemKV", "MemKV", "__version__"]

_LAZY = {"MemKV": "memkv.sdk.client", "AsyncMemKV": "memkv.sdk.async_client"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'memkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
