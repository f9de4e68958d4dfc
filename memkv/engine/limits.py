"""What can never run is refused before it waits for anything."""

from __future__ import annotations

from memkv.errors import ContextTooLong
from memkv.kv.layout import KVLayout
from memkv.model.support import ModelSpec


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
