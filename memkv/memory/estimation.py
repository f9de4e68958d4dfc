"""What documents will cost before they are ingested, and whether they fit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from memkv.engine.residency import ChunkRef
from memkv.errors import CollectionNotFound
from memkv.kv.fingerprint import input_key
from memkv.memory.collections import Collections, OpenCollection
from memkv.memory.parts import Parts
from memkv.store.block_file import file_bytes
from memkv.store.durable_files import write_new_file
from memkv.store.rows import CollectionRow, NewCollection
from memkv.store.space_reserve import RESERVE_BYTES
from memkv.wire import CollectionCreate, Estimate

_PROBE_BYTES = 4 << 20  # written to learn how quick the disk is
_VECTOR_ROW_BYTES = 8  # of an index, besides the vector


@dataclass(frozen=True, slots=True)
class TitledText:
    title: str
    text: str


class Estimation:
    """Thread-safe."""

    def __init__(self, parts: Parts, collections: Collections) -> None:
        self._parts = parts
        self._collections = collections

    def estimate(self, tenant: str, name: str, texts: Sequence[TitledText]) -> Estimate:
        """The cost of these texts in a collection, or in one of the default settings where there is none."""
        target = self._target(tenant, name)
        chunks = self._chunks(tenant, target, texts)
        known = self._parts.store.catalog.existing_keys(tenant, list(chunks))
        new = {key: tokens for key, tokens in chunks.items() if key not in known}
        layout = self._collections.layout(target.block_size)
        kv_bytes = sum(file_bytes(layout, len(tokens)) for tokens in new.values())
        new_tokens = sum(map(len, new.values()))
        sample = next(iter(new.values()), ())
        per_second = self._prefill_speed(target, sample) if new else 0.0
        seconds = new_tokens / per_second if new else 0.0
        room = self._room(tenant, target)
        return Estimate(
            collection_exists=isinstance(target, CollectionRow),
            documents=len(texts),
            chunks=len(chunks),
            tokens=sum(map(len, chunks.values())),
            new_chunks=len(new),
            new_tokens=new_tokens,
            kv_bytes=kv_bytes,
            index_bytes=len(chunks) * (4 * target.dim + _VECTOR_ROW_BYTES),
            prefill_seconds=seconds,
            keep_after_uses=_break_even(seconds, kv_bytes / self._disk_speed()) if new else None,
            room_bytes=room,
            fits=kv_bytes <= room,
        )

    def require_room(self, collection: OpenCollection, texts: Sequence[TitledText]) -> None:
        """Raises InsufficientStorageError where the KV of these texts passes a cap. Costs nothing without."""
        row, quota = collection.row, self._parts.store.chunks.quota
        if row.prefill != "eager" or quota.room(row.tenant, row.id) == math.inf:
            return
        quota.require(row.tenant, row.id, self.needed_bytes(row, texts))

    def needed_bytes(self, row: CollectionRow, texts: Sequence[TitledText]) -> int:
        """Bytes of the block files that these texts lack."""
        chunks = self._chunks(row.tenant, row, texts)
        known = self._parts.store.catalog.existing_keys(row.tenant, list(chunks))
        layout = self._collections.layout(row.block_size)
        return sum(file_bytes(layout, len(tokens)) for key, tokens in chunks.items() if key not in known)

    def room(self, row: CollectionRow) -> int:
        """Bytes that may still be written for a collection: below the caps, and on the disk."""
        return self._room(row.tenant, row)

    def _target(self, tenant: str, name: str) -> CollectionRow | NewCollection:
        try:
            return self._collections.by_name(tenant, name).row
        except CollectionNotFound:
            return self._collections.new(CollectionCreate(name=name))

    def _chunks(
        self, tenant: str, target: CollectionRow | NewCollection, texts: Sequence[TitledText]
    ) -> dict[str, tuple[int, ...]]:
        """Key -> tokens of every chunk."""
        secret = self._parts.store.catalog.tenant_secret(tenant)
        found: dict[str, tuple[int, ...]] = {}
        for text in texts:
            cut = self._parts.cutter.cut(text.text, text.title, target.max_chunk_tokens)
            for chunk in cut:
                tokens = tuple(chunk.token_ids)
                found[input_key(secret, target.fingerprint_digest, target.prefix_ids, tokens)] = tokens
        return found

    def _room(self, tenant: str, target: CollectionRow | NewCollection) -> int:
        """Bytes that may still be written: below the caps, and on the disk."""
        disk = os.statvfs(self._parts.store.data_dir)
        free = max(0, disk.f_bavail * disk.f_frsize - RESERVE_BYTES)
        collection_id = target.id if isinstance(target, CollectionRow) else ""
        return max(0, int(min(free, self._parts.store.chunks.quota.room(tenant, collection_id))))

    def _prefill_speed(self, target: CollectionRow | NewCollection, token_ids: tuple[int, ...]) -> float:
        """Tokens a second, as the engine saw it; measured on one of the chunks before it saw any."""
        for lane in self._parts.engine.stats().lanes:
            if lane.block_size == target.block_size and lane.fill_tokens_per_second:
                return lane.fill_tokens_per_second
        # Behind no prefix: what is measured is the speed, and the KV is thrown away.
        ref = ChunkRef("estimate", (), token_ids)
        nothing = ChunkRef("", (), ())
        started = time.perf_counter()
        self._parts.engine.prefill(nothing, [ref], NoKV(), block_size=target.block_size)
        self._parts.engine.drop([ref.input_key])
        return len(token_ids) / (time.perf_counter() - started)

    def _disk_speed(self) -> float:
        """Bytes a second that the disk takes for good."""
        path = self._parts.store.temporary_path()
        started = time.perf_counter()
        try:
            write_new_file(path, [os.urandom(_PROBE_BYTES)], mode=0o600)
            return _PROBE_BYTES / (time.perf_counter() - started)
        finally:
            path.unlink(missing_ok=True)


class NoKV:
    """A source without KV that keeps none."""

    def read(self, ref: ChunkRef) -> None:
        return None

    def write(self, ref: ChunkRef, kv: object) -> None:
        return None


def _break_even(prefill_seconds: float, disk_seconds: float) -> int | None:
    """After how many uses keeping costs less time than recomputing: computed and written once and read at
    each use, against computed at each use; None where reading takes longer than computing.
    """
    saved = prefill_seconds - disk_seconds
    if saved <= 0:
        return None
    return math.ceil((prefill_seconds + disk_seconds) / saved)
