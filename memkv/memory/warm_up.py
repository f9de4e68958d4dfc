"""What questions mapped most is loaded when a memory is opened, while nobody asks anything of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import structlog

from memkv.engine.residency import ChunkRef
from memkv.errors import EngineClosed, FingerprintMismatch, MemKVError, NotFoundError
from memkv.memory.background_thread import BackgroundThread
from memkv.memory.collections import Collections, OpenCollection
from memkv.memory.parts import Parts

_log = structlog.get_logger(__name__)

_PAUSE_SECONDS = 0.02  # between two looks at whether the engine is idle
_MOST_CHUNKS = 10_000  # that are looked at


class WarmUp(BackgroundThread):
    """Ends by itself, or before the next chunk.

    One chunk at a time, `engine.warm_share` of all pools is filled, then of all host pools.
    """

    def __init__(self, parts: Parts, collections: Collections) -> None:
        super().__init__("memkv-warm-up")
        self._parts = parts
        self._collections = collections

    def run(self) -> None:
        engine = self._parts.engine
        loaded = 0
        try:
            for collection, ref, to_host in self._most_used():
                while not engine.is_idle():
                    if self.stopping.wait(_PAUSE_SECONDS):
                        return
                refs = (collection.prefix, ref)
                engine.prefetch(refs, collection.kv, block_size=collection.row.block_size, to_host=to_host)
                loaded += 1
        except EngineClosed:
            return
        except MemKVError as error:  # questions load what they need themselves
            _log.warning("warm_up_ended", code=error.code, detail=error.detail)
        if loaded:
            _log.info("warmed_up", chunks=loaded)

    def _most_used(self) -> Iterator[tuple[OpenCollection, ChunkRef, bool]]:
        """As many as the shares take, and whether each goes to the host pool."""
        catalog, share = self._parts.store.catalog, self._parts.config.engine.warm_share
        left, host_left = (share * size for size in self._parts.engine.budgets)
        for file in catalog.most_used_files(_MOST_CHUNKS) if left else ():
            try:
                chunk = catalog.chunk_of_key(file.tenant, file.input_key)
                row = catalog.collection_by_id(file.tenant, chunk.collection_id)
                collection = self._collections.open(row)
            except (NotFoundError, FingerprintMismatch):
                continue
            size = collection.layout.bytes_for(len(chunk.token_ids))
            to_host = size > left
            if to_host:
                host_left -= size
                if host_left < 0:
                    return
            left -= 0 if to_host else size
            yield collection, collection.ref(file.input_key, chunk.token_ids), to_host
