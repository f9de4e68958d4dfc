"""The KV of a store's chunks: published, verified on every load, healed, reclaimed.

Order of a publication, so that a kill at any point leaves no row without its file:

    tmp, reserve, write, fsync (in parallel) -> link to the final name -> fsync each directory -> rows in SQL

Healing and reclaiming go the other way round: the row first, then the file. Rows and names change under one
lock; loads take it only when something is wrong. Bytes are never rewritten in place.
"""

from __future__ import annotations

import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from memkv.errors import MemKVError, ServiceUnavailableError
from memkv.kv.chunk import ChunkKV
from memkv.kv.fingerprint import token_digest
from memkv.kv.layout import KVLayout
from memkv.store.block_directory import BlockDirectory
from memkv.store.block_file import (
    BlockFileIdentity,
    check_block_file,
    encode_header,
    file_bytes,
    file_digest,
    file_name,
    read_block_file,
)
from memkv.store.catalog import Catalog
from memkv.store.durable_files import Damage, storage_error, write_new_file
from memkv.store.quota import NO_CAPS, Caps, Claim, Quota
from memkv.store.rows import DEFAULT_TENANT, KVFileRow, Released

_WRITERS = 16  # threads that write and fsync; the disk merges their flushes


@dataclass(frozen=True, slots=True, eq=False)
class PublishItem:
    input_key: str
    fingerprint_digest: str
    context_ids: Sequence[int]
    token_ids: Sequence[int]
    kv: ChunkKV
    tenant: str = DEFAULT_TENANT
    collection_id: str = ""  # that it counts against


@dataclass(frozen=True, slots=True)
class Orphan:
    """A file under blocks/ that no row names."""

    name: str
    num_bytes: int
    removed: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    drafts_removed: int
    rows_dropped: int  # their file was gone
    orphans: int  # files that no row names


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A written, durable file that has no final name yet."""

    row: KVFileRow
    identity: BlockFileIdentity
    path: Path


class LoadTimes(NamedTuple):
    """In seconds of `time.monotonic`: when a load began, had its bytes, and had verified them."""

    began: float
    read: float
    verified: float


class ChunkStore:
    """Thread-safe. Its directories must exist (`Store.open` makes them).

    Attributes:
        on_load: for measurements: told of each load, in the thread that made it.
    """

    def __init__(self, data_dir: Path, catalog: Catalog, caps: Caps = NO_CAPS) -> None:
        self._directory = BlockDirectory(data_dir)
        self.quota = Quota(catalog, caps)
        self.on_load: Callable[[LoadTimes], None] | None = None
        self._catalog = catalog
        self._names = threading.Lock()  # rows and final names change together under it
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="memkv-fsync")

    def publish(self, items: Sequence[PublishItem]) -> int:
        """Stores chunks durably and makes them visible, all or none; returns how many were new.

        A key that is there already is left as it is.

        Raises:
            InsufficientStorageError: the disk is full, or a cap is reached; nothing is visible, nothing left.
            ServiceUnavailableError: the disk or the database failed; nothing is visible.
        """
        missing = self._missing(items)
        with self.quota.claim([_claim(item) for item in missing]):
            drafts = self._write_drafts(missing)
            try:
                with self._names:
                    added = self._make_visible(drafts)
            finally:
                for draft in drafts:
                    with suppress(OSError):
                        draft.path.unlink(missing_ok=True)
        self._count(published=len(added), published_bytes=sum(row.num_bytes for row in added))
        return len(added)

    def load(
        self,
        input_key: str,
        *,
        fingerprint_digest: str,
        layout: KVLayout,
        context_ids: Sequence[int],
        token_ids: Sequence[int],
        tenant: str = DEFAULT_TENANT,
    ) -> ChunkKV | None:
        """The chunk's KV, every byte verified, or None where there is none.

        A missing or damaged file, or one of another model, other tokens or another layout, counts as none:
        its row is dropped, the file goes to quarantine. Raises only what the database does
        (DatabaseUnavailable, DatabaseDamaged).
        """
        identity = BlockFileIdentity(
            input_key=input_key,
            fingerprint_digest=fingerprint_digest,
            token_digest=token_digest(context_ids, token_ids),
            layout=layout,
            context_tokens=len(context_ids),
            num_tokens=len(token_ids),
        )
        row = self._catalog.file_for(tenant, input_key)
        if row is None:
            self._count(misses=1)
            return None
        found = self._read(row, identity)
        if isinstance(found, Damage):
            found = self._look_again(tenant, identity, found)
        if isinstance(found, Damage):
            self._count(misses=1, **{f"damaged_{found.kind}": 1})
            return None
        self._count(hits=1, loaded_bytes=identity.file_bytes)
        return found

    def release_unused(self, tenant: str, input_keys: Sequence[str]) -> Released:
        """Lets go of published KV that no chunk and no prefix refers to (any more): row, then file."""
        released = self._catalog.release_unused(tenant, input_keys)
        if released.files:
            self.reclaim(released.files)
        return released

    def reclaim(self, released: Sequence[KVFileRow]) -> int:
        """Unlinks files whose rows were dropped; returns the bytes. Skips keys that were published again."""
        freed = 0
        with self._names:
            for row in released:
                current = self._catalog.file_for(row.tenant, row.input_key)
                if current is not None and current.file_digest == row.file_digest:
                    continue
                with suppress(OSError):
                    self._directory.path(row).unlink()
                    freed += row.num_bytes
        self._count(reclaimed=len(released), reclaimed_bytes=freed)
        return freed

    def recover(self) -> Recovered:
        """At an opening: clears tmp/ and drops rows whose file is gone."""
        drafts = self._directory.clear_temporary()
        with self._names:
            listing = self._directory.list()
            rows = self._catalog.files_of_all_tenants()
            missing = [row for row in rows if listing.lacks(row)]
            if missing:
                self._catalog.drop_files_of_all_tenants(missing)
        named = {file_name(row.input_key, row.file_digest) for row in rows}
        return Recovered(drafts, len(missing), len(listing.names - named))

    def path(self, row: KVFileRow) -> Path:
        """Where a row's file stands."""
        return self._directory.path(row)

    def check(self, row: KVFileRow, *, full: bool) -> Damage | None:
        """What is wrong with a row's file; None where nothing is."""
        path = self._directory.path(row)
        if full and (damage := check_block_file(path, row)) is not None:
            return damage
        try:
            found = path.lstat()
        except FileNotFoundError:
            return Damage("missing", "there is no such file")
        except OSError as error:
            return Damage("unreadable", error.strerror or type(error).__name__, transient=True)
        if not stat.S_ISREG(found.st_mode):
            return Damage("irregular", "not a regular file")
        if found.st_size != row.num_bytes:
            return Damage("size", f"{found.st_size} bytes, not {row.num_bytes}")
        if found.st_mode & 0o777 != 0o400:
            return Damage("mode", f"its mode is {found.st_mode & 0o777:o}, not 400")
        return None

    def set_right(self, row: KVFileRow, damage: Damage) -> bool:
        """Mends a file's mode; sets any other damaged file aside with its row dropped. Whether it could."""
        if damage.transient:
            return False
        if damage.kind == "mode":
            return self._directory.restrict(row)
        with self._names:
            return self._discard_locked(row, damage)

    def orphans(self, *, remove: bool = False) -> list[Orphan]:
        """Files that no row names; removed where `remove` says so."""
        with self._names:
            rows = self._catalog.files_of_all_tenants()
            named = {file_name(row.input_key, row.file_digest) for row in rows}
            names = sorted(self._directory.list().names - named)
            return [
                Orphan(name, self._directory.size_of(name), remove and self._directory.unlink(name))
                for name in names
            ]

    def release_all_unused(self) -> tuple[KVFileRow, ...]:
        """Lets go of every file whose key nothing refers to: rows, then files."""
        unused = self._catalog.unused_files()
        released: list[KVFileRow] = []
        for tenant in {row.tenant for row in unused}:
            keys = [row.input_key for row in unused if row.tenant == tenant]
            released += self.release_unused(tenant, keys).files
        return tuple(released)

    def evict(self, rows: Sequence[KVFileRow]) -> int:
        """Drops files that may be needed again, rows first; the next use prefills. Returns the bytes."""
        self._catalog.drop_files_of_all_tenants(rows)
        return self.reclaim(rows)

    def stats(self) -> dict[str, int]:
        """Since the opening: hits, misses, published, damaged_<kind> ...; and what is in quarantine."""
        files, size = self._directory.quarantined()
        with self._counting:
            return {**self._counts, "quarantine_files": files, "quarantine_bytes": size}

    def close(self) -> None:
        self._writers.shutdown()

    # writing

    def _missing(self, items: Sequence[PublishItem]) -> list[PublishItem]:
        """The items whose key has no row, each key once."""
        by_key = {(item.tenant, item.input_key): item for item in items}
        for tenant in {item.tenant for item in items}:
            keys = [item.input_key for item in items if item.tenant == tenant]
            for key in self._catalog.existing_keys(tenant, keys):
                del by_key[tenant, key]
        return list(by_key.values())

    def _write_drafts(self, items: Sequence[PublishItem]) -> list[_Draft]:
        futures: list[Future[_Draft]] = [self._writers.submit(self._write_draft, item) for item in items]
        drafts: list[_Draft] = []
        failure: MemKVError | None = None
        for future in futures:
            try:
                drafts.append(future.result())
            except MemKVError as error:
                failure = failure or error
        if failure is not None:
            for draft in drafts:
                with suppress(OSError):
                    draft.path.unlink()
            raise failure
        return drafts

    def _write_draft(self, item: PublishItem) -> _Draft:
        identity = BlockFileIdentity(
            input_key=item.input_key,
            fingerprint_digest=item.fingerprint_digest,
            token_digest=token_digest(item.context_ids, item.token_ids),
            layout=item.kv.layout,
            context_tokens=len(item.context_ids),
            num_tokens=len(item.token_ids),
        )
        parts = [encode_header(identity, item.kv), item.kv.data]
        row = KVFileRow(
            input_key=item.input_key,
            tenant=item.tenant,
            fingerprint_digest=item.fingerprint_digest,
            file_digest=file_digest(parts),
            num_tokens=identity.num_tokens,
            num_bytes=identity.file_bytes,
            collection_id=item.collection_id,
        )
        path = self._directory.temporary_path()
        write_new_file(path, parts, mode=0o400)
        return _Draft(row, identity, path)

    def _make_visible(self, drafts: Sequence[_Draft]) -> list[KVFileRow]:
        """Final names, then rows. Called under the lock."""
        by_tenant: dict[str, set[str]] = {}
        for tenant in {draft.row.tenant for draft in drafts}:
            keys = [draft.row.input_key for draft in drafts if draft.row.tenant == tenant]
            by_tenant[tenant] = self._catalog.existing_keys(tenant, keys)
        new = [draft for draft in drafts if draft.row.input_key not in by_tenant[draft.row.tenant]]
        if not new:
            return []
        linked: list[Path] = []
        try:
            for draft in new:
                path = self._directory.path(draft.row)
                if self._directory.link(draft.path, draft.row, draft.identity):
                    linked.append(path)
            self._directory.sync_shards(draft.row for draft in new)
        except (OSError, ServiceUnavailableError) as error:
            for path in linked:
                with suppress(OSError):
                    path.unlink()
            raise storage_error(error) if isinstance(error, OSError) else error from error
        # From here on a failure leaves files that no row names: whether the commit took place is unknown.
        return self._catalog.register_files([draft.row for draft in new])

    # reading and healing

    def _read(self, row: KVFileRow, identity: BlockFileIdentity) -> ChunkKV | Damage:
        path = self._directory.path(row)
        if self.on_load is None:
            return read_block_file(path, identity, row.file_digest)
        read: list[float] = []
        began = time.monotonic()
        found = read_block_file(path, identity, row.file_digest, lambda: read.append(time.monotonic()))
        self.on_load(LoadTimes(began, read[0], time.monotonic()))
        return found

    def _look_again(self, tenant: str, identity: BlockFileIdentity, first: Damage) -> ChunkKV | Damage:
        """Under the lock: another thread may have healed or reclaimed the key; else it is discarded here."""
        if first.transient:
            return first
        with self._names:
            row = self._catalog.file_for(tenant, identity.input_key)
            if row is None:
                return first
            found = read_block_file(self._directory.path(row), identity, row.file_digest)
            if isinstance(found, Damage) and not found.transient:
                self._discard_locked(row, found)
            return found

    def _discard_locked(self, row: KVFileRow, damage: Damage) -> bool:
        """Row first, then the file. False where the database cannot be written: the next load tries again."""
        try:
            self._catalog.drop_file(row.tenant, row.input_key, row.file_digest)
        except MemKVError:
            return False
        if damage.kind != "missing":
            self._count(quarantined=int(self._directory.quarantine(self._directory.path(row), damage)))
        return True

    def _count(self, **counts: int) -> None:
        with self._counting:
            self._counts.update(counts)


def _claim(item: PublishItem) -> Claim:
    return Claim(item.tenant, item.collection_id, file_bytes(item.kv.layout, item.kv.num_tokens))
