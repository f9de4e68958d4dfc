"""A memory in this process behind the blocking client: no server, no network, the same methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from memkv.config import Config, load_config
from memkv.errors import BadRequestError
from memkv.sdk.call import Call
from memkv.sdk.streaming import EventSource
from memkv.wire import QueryRequest

if TYPE_CHECKING:
    from memkv.memory import Memory

T = TypeVar("T")


class LocalSender:
    """Sends calls to a memory; owns it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    @classmethod
    def open(
        cls,
        path: str | Path,
        model: str | None,
        embedder: str | None,
        config: Config | None,
        on_progress: Callable[[str], None] | None,
        models: bool = True,
    ) -> LocalSender:
        """See `MemKV.local`."""
        if config is None:
            flags = {"store.data_dir": str(path), "model.model": model, "model.embedder": embedder}
            config = load_config(flags)
        elif model is not None or embedder is not None:
            raise BadRequestError(
                "the models are in the configuration", hint="give config, or model and embedder"
            )
        if not models:
            from memkv.memory.stored import StoredMemory

            return cls(cast("Memory", StoredMemory.open_store(config)))
        # Here and not above: it brings torch, and a client of a server needs none.
        from memkv.memory import Memory

        return cls(Memory.open(config, on_progress=on_progress))

    def send(self, call: Call[T]) -> T:
        return call.local(self._memory)

    def open_stream(self, call: Call[Any]) -> EventSource:
        assert isinstance(call.body, QueryRequest), "bug: only a query is streamed"
        return self._memory.query_stream(call.body)

    def close(self) -> None:
        self._memory.close()
