"""Chunks loaded into the engine's memory before anybody asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from memkv.engine.residency import ChunkRef
from memkv.errors import FingerprintMismatch, NotFoundError
from memkv.memory.collections import Collections, OpenCollection
from memkv.memory.parts import Parts
from memkv.store.rows import KVFileRow

_PAUSE_SECONDS = 0.005  # between two looks at whether the engine is idle
_MOST_SECONDS = 0.5  # that one chunk waits for it


def preload(
    parts: Parts, collections: Collections, files: Iterable[KVFileRow], wait: Callable[[int], None]
) -> int:
    """Has the engine load the chunks of files, one by one, in order; returns how many it was asked for.

    `engine.warm_share` of all pools is filled, then of all host pools. What is no chunk's, or was made by
    another model, is passed over.

    Args:
        wait: called before each with how many came before, until the engine may be asked for it; may raise.
    """
    loaded = 0
    for collection, ref, to_host in _within_shares(parts, collections, files):
        wait(loaded)
        refs = (collection.prefix, ref)
        parts.engine.prefetch(refs, collection.kv, block_size=collection.row.block_size, to_host=to_host)
        loaded += 1
    return loaded


def preload_beside_questions(
    parts: Parts,
    collections: Collections,
    files: Sequence[KVFileRow],
    on_progress: Callable[[int, int], None],
) -> None:
    """The same for a caller that waits: while the engine has nothing else to do, or slowly."""

    def wait(loaded: int) -> None:
        on_progress(loaded, len(files))
        deadline = time.monotonic() + _MOST_SECONDS
        while not parts.engine.is_idle() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)

    wait(preload(parts, collections, files, wait))
    on_progress(len(files), len(files))


def _within_shares(
    parts: Parts, collections: Collections, files: Iterable[KVFileRow]
) -> Iterator[tuple[OpenCollection, ChunkRef, bool]]:
    """As many as the shares take, and whether each goes to the host pool."""
    catalog, share = parts.store.catalog, parts.config.engine.warm_share
    left, host_left = (share * size for size in parts.engine.budgets)
    for file in files:
        try:
            chunk = catalog.chunk_of_key(file.tenant, file.input_key)
            row = catalog.collection_by_id(file.tenant, chunk.collection_id)
            collection = collections.open(row)
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
