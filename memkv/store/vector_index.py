"""Exact inner-product search over a collection's vectors: FAISS in memory, vectors in a file.

Large collections are searched on a GPU where there is one for FAISS, unless a filter says what to look at.

The file is a copy of what SQL holds, kept to make a start quick; it is used only if it is whole and of this
very generation, and made again from SQL otherwise. It holds vectors, never FAISS' own format: reading an
index that someone damaged is reading memory that someone chose.

    offset  bytes
         0      8  magic
         8      8  format version, metric (1 = inner product)          2 x uint32
        16     16  store id
        32     16  collection id
        48      8  generation
        56     16  stamp of that generation
        72     16  count, dim                                          2 x uint64
        88      8  zero
        96     16  xxh3-128 of the 96 bytes before it and of the payload
       112    8 n  row ids, int64
            4 n d  vectors, float32
"""

from __future__ import annotations

import struct
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import faiss
import numpy as np
import xxhash
from numpy.typing import NDArray

from memkv.store.catalog import Catalog
from memkv.store.durable_files import Damage, read_file, replace_file
from memkv.store.gpu_search import Gpu, GpuCopy
from memkv.store.read_write_lock import ReadWriteLock
from memkv.store.rows import Change, CollectionRow, Vectors

_MAGIC = b"memkvVEC"
_FORMAT_VERSION = 1
_INNER_PRODUCT = 1
_HEADER = struct.Struct("<8sII16s16sq16sQQ8x")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    row_ids: NDArray[np.int64]  # [n], best first
    scores: NDArray[np.float32]  # [n], inner products


class VectorIndex:
    """One collection's vectors. Thread-safe; searches run side by side."""

    def __init__(self, content: Vectors, dim: int, gpu: Gpu) -> None:
        self.dim = dim
        self._gpu_copy = GpuCopy(gpu)
        self._num_removals = 0
        self._lock = ReadWriteLock()
        self._applied = threading.Condition()
        self._generation, self._stamp = content.generation, content.stamp
        self._fill(content)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def generation(self) -> int:
        return self._generation

    def search(
        self, vector: NDArray[np.float32], k: int, *, among: NDArray[np.int64] | None = None
    ) -> Neighbours:
        """The `k` rows nearest to `vector` ([dim]), of all or of those in `among`; fewer where fewer are."""
        query = np.ascontiguousarray(vector, dtype=np.float32).reshape(1, self.dim)
        with self._lock.read():
            k = min(k, len(self) if among is None else len(among), len(self))
            if k <= 0:
                return Neighbours(np.empty(0, np.int64), np.empty(0, np.float32))
            if among is None:
                scores, ids = self._search_all(query, k)
            else:
                wanted = faiss.SearchParameters(sel=faiss.IDSelectorBatch(among))  # type: ignore[call-arg]
                scores, ids = self._index.search(query, k, params=wanted)
        found = ids[0] >= 0
        return Neighbours(ids[0][found], scores[0][found])

    def apply(self, change: Change) -> bool:
        """Follows a committed change. False where an earlier one is missing: the index must be made again."""
        with self._lock.write():
            if change.generation <= self._generation:
                return True
            if change.generation != self._generation + 1:
                return False
            if len(change.removed):
                self._index.remove_ids(change.removed)  # type: ignore[arg-type]
                self._num_removals += 1
            if len(change.added):
                self._index.add_with_ids(np.ascontiguousarray(change.vectors), change.added)
            self._generation, self._stamp = change.generation, change.stamp
        self._announce()
        return True

    def replace(self, content: Vectors) -> None:
        """Takes over `content`, unless the index is newer already."""
        with self._lock.write():
            if content.generation > self._generation:
                self._fill(content)
        self._announce()

    def wait_for(self, generation: int, timeout: float) -> bool:
        """Whether the index reached `generation` within `timeout` seconds."""
        with self._applied:
            return self._applied.wait_for(lambda: self._generation >= generation, timeout)

    def content(self) -> Vectors:
        """A copy of what the index holds."""
        with self._lock.read():
            ids = faiss.vector_to_array(self._index.id_map).astype(np.int64)
            flat = faiss.vector_to_array(self._flat.codes).view(np.float32).reshape(len(ids), self.dim)
            return Vectors(self._generation, self._stamp, ids, flat)

    def _search_all(
        self, query: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(scores, row ids), [1, k] each."""
        found = self._gpu_copy.search(self._flat, self._num_removals, query, k)
        if found is None:
            return self._index.search(query, k)
        scores, places = found
        row_ids = faiss.rev_swig_ptr(self._index.id_map.data(), len(self))
        return scores, np.where(places < 0, -1, row_ids[places])

    def _fill(self, content: Vectors) -> None:
        self._num_removals += 1
        self._flat = faiss.IndexFlatIP(self.dim)
        self._index = faiss.IndexIDMap2(self._flat)
        if len(content.row_ids):
            self._index.add_with_ids(
                np.ascontiguousarray(content.vectors, dtype=np.float32),
                np.ascontiguousarray(content.row_ids, dtype=np.int64),
            )
        self._generation, self._stamp = content.generation, content.stamp

    def _announce(self) -> None:
        with self._applied:
            self._applied.notify_all()


class VectorIndexes:
    """The indexes of a store's collections: each loaded at its first use."""

    def __init__(
        self,
        directory: Path,
        temporary: Callable[[], Path],
        store_id: str,
        catalog: Catalog,
    ) -> None:
        """`temporary` names a fresh file on the same file system."""
        self._directory = directory
        self._temporary = temporary
        self._store_id = store_id
        self._catalog = catalog
        self._gpu = Gpu()
        self._indexes: dict[str, VectorIndex] = {}
        self._guard = threading.Lock()
        self._loads: dict[str, threading.Lock] = {}  # one load of a collection at a time
        self._counts = {"loaded": 0, "rebuilt": 0}

    def get(self, collection: CollectionRow) -> VectorIndex:
        """The collection's index, holding everything committed before this call."""
        state = self._catalog.collection_state(collection.tenant, collection.id)
        if state is None:
            return self._nothing(collection)
        with self._guard:
            index = self._indexes.get(collection.id)
        if index is None:
            with self._loading(collection.id):
                with self._guard:
                    index = self._indexes.get(collection.id)
                if index is None:
                    index = self._open(collection)
        # A commit is followed within moments; only a follower that died leaves the index behind.
        if index.generation < state[0] and not index.wait_for(state[0], 1.0):
            self._catch_up(collection.tenant, collection.id, index)
        return index

    def apply(self, tenant: str, change: Change) -> None:
        """Follows a committed change, in whatever order the commits arrive here."""
        with self._loading(change.collection_id):  # an index that is being loaded may lack this change
            with self._guard:
                index = self._indexes.get(change.collection_id)
            if index is not None and not index.apply(change):
                self._catch_up(tenant, change.collection_id, index)

    def drop(self, collection_id: str) -> None:
        """Forgets a deleted collection."""
        with self._guard:
            self._indexes.pop(collection_id, None)
            self._loads.pop(collection_id, None)
        with suppress(OSError):  # left behind it harms nobody: no collection has this id again
            self._path(collection_id).unlink()

    def save(self, collection_id: str) -> bool:
        """Writes the file of a loaded index. Raises InsufficientStorageError, ServiceUnavailableError."""
        with self._guard:
            index = self._indexes.get(collection_id)
        if index is None:
            return False
        parts = encode_vectors(index.content(), self._store_id, collection_id, index.dim)
        replace_file(self._path(collection_id), self._temporary(), parts)
        return True

    def save_all(self) -> None:
        with self._guard:
            loaded = list(self._indexes)
        for collection_id in loaded:
            self.save(collection_id)

    def stats(self) -> dict[str, int]:
        with self._guard:
            vectors = sum(len(index) for index in self._indexes.values())
            return {"open": len(self._indexes), "vectors": vectors, **self._counts}

    def check(self, collection: CollectionRow) -> Damage | None:
        """What is wrong with the collection's file; nothing where it is merely old, or not there."""
        found = decode_vectors(self._path(collection.id), self._store_id, collection)
        return found if isinstance(found, Damage) and found.kind not in ("missing", "stale") else None

    def _open(self, collection: CollectionRow) -> VectorIndex:
        state = self._catalog.collection_state(collection.tenant, collection.id)
        if state is None:
            return self._nothing(collection)
        newest = replace(collection, generation=state[0], stamp=state[1])
        filed = decode_vectors(self._path(collection.id), self._store_id, newest)
        content = (
            self._catalog.vectors(collection.tenant, collection.id) if isinstance(filed, Damage) else filed
        )
        if content is None:
            return self._open(collection)
        index = VectorIndex(content, collection.dim, self._gpu)
        with self._guard:
            self._counts["loaded" if content is filed else "rebuilt"] += 1
            self._indexes[collection.id] = index
        return index

    def _catch_up(self, tenant: str, collection_id: str, index: VectorIndex) -> None:
        content = self._catalog.vectors(tenant, collection_id)
        if content is not None:
            index.replace(content)
            with self._guard:
                self._counts["rebuilt"] += 1

    def _nothing(self, collection: CollectionRow) -> VectorIndex:
        """Of a collection that was deleted meanwhile."""
        no_vectors = np.empty((0, collection.dim), np.float32)
        content = Vectors(0, bytes(16), np.empty(0, np.int64), no_vectors)
        return VectorIndex(content, collection.dim, self._gpu)

    def _loading(self, collection_id: str) -> threading.Lock:
        with self._guard:
            return self._loads.setdefault(collection_id, threading.Lock())

    def _path(self, collection_id: str) -> Path:
        return self._directory / f"{collection_id}.vectors"


def encode_vectors(content: Vectors, store_id: str, collection_id: str, dim: int) -> list[bytes]:
    """The parts of an index file, in order."""
    ids = content.row_ids.astype("<i8", copy=False).tobytes()
    vectors = content.vectors.astype("<f4", copy=False).tobytes()
    header = _header(store_id, collection_id, content.generation, content.stamp, len(content.row_ids), dim)
    return [header, _digest(header, ids, vectors), ids, vectors]


def decode_vectors(path: Path, store_id: str, collection: CollectionRow) -> Vectors | Damage:
    """What an index file holds, if it is whole and of the collection's generation. Never raises."""
    data = read_file(path)
    if isinstance(data, Damage):
        return data
    start = _HEADER.size + _DIGEST_BYTES
    if len(data) < start:
        return Damage("size", "shorter than a header")
    view = memoryview(data)
    count = _HEADER.unpack_from(data)[7]
    expected = _header(
        store_id, collection.id, collection.generation, collection.stamp, count, collection.dim
    )
    if data[: _HEADER.size] != expected:
        before, after = slice(0, 48), slice(72, _HEADER.size)  # generation and stamp lie between
        if data[before] == expected[before] and data[after] == expected[after]:
            return Damage("stale", "of another generation")
        return Damage("header", "of another store, collection, dimension or format")
    if len(data) != start + count * (8 + 4 * collection.dim):
        return Damage("size", f"{len(data)} bytes for {count} vectors")
    ids, vectors = view[start : start + 8 * count], view[start + 8 * count :]
    if _digest(view[: _HEADER.size], ids, vectors) != data[_HEADER.size : start]:
        return Damage("digest", "its bytes are not those that were written")
    return Vectors(
        collection.generation,
        collection.stamp,
        np.frombuffer(ids, dtype="<i8").astype(np.int64),
        np.frombuffer(vectors, dtype="<f4").astype(np.float32).reshape(count, collection.dim),
    )


def _header(store_id: str, collection_id: str, generation: int, stamp: bytes, count: int, dim: int) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        _FORMAT_VERSION,
        _INNER_PRODUCT,
        uuid.UUID(hex=store_id).bytes,
        uuid.UUID(hex=collection_id.removeprefix("col_")).bytes,
        generation,
        stamp,
        count,
        dim,
    )


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()
