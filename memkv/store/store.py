"""A store: one data directory, one database, one process that may write.

    memkv.db      the database, unless a PostgreSQL one is named: truth
    blocks/       KV, one immutable file per chunk: derived
    indexes/      vectors, one file per collection: derived
    snapshots/    copies of the database with links to block files
    tmp/  quarantine/  STORE (id and format, pairs the directory with its database)  lock  reserve
    restoring.json  while a server's database is replaced

Every operation that concerns more than one of these is a method here, in the order that no kill can break:
rows first and the index and files after them, except that a block file is durable before its row.
"""

from __future__ import annotations

import json
import os
import stat
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from memkv.errors import ConfigError, MemKVError, MigrationNeeded
from memkv.store.catalog import Catalog
from memkv.store.catalog_jobs import SNAPSHOT
from memkv.store.catalog_restores import tell_restored
from memkv.store.chunk_store import ChunkStore
from memkv.store.database import Database, parse_database_url
from memkv.store.durable_files import Damage, read_file, replace_file, sync_directory
from memkv.store.filters import parse_filter
from memkv.store.jobs import Jobs
from memkv.store.lock import StoreLock, take_advisory_lock
from memkv.store.quota import NO_CAPS, Caps
from memkv.store.restore_journal import read_journal, remove_journal
from memkv.store.restored_keys import take_keys_back
from memkv.store.rows import (
    Accepted,
    Change,
    CollectionRow,
    Committed,
    DeletedCollection,
    NewChunk,
    NewCollection,
    NewDocument,
    RenewedCollection,
)
from memkv.store.schema import SchemaRevision, require_schema, schema_revision
from memkv.store.search import SearchHit, search_collection
from memkv.store.snapshots import Snapshots
from memkv.store.space_reserve import RESERVE_BYTES, SpaceReserve
from memkv.store.upkeep import Upkeep
from memkv.store.uses import Uses
from memkv.store.vector_index import VectorIndexes
from memkv.store.verification import StoreProblem, Verified, verify_files

FORMAT_VERSION = 1  # of the data directory

_DIRECTORIES = ("blocks", "tmp", "quarantine", "indexes")
_DURABLE_SYNCHRONOUS = {"wal": 2, "other": 3}  # SQLite: FULL, EXTRA


@dataclass(frozen=True, slots=True)
class Recovery:
    """What an opening found and put right."""

    schema: SchemaRevision  # as it was found
    epoch: int
    drafts_removed: int  # unfinished files in tmp/
    rows_dropped: int  # of KV whose file was gone: it will be prefilled again
    orphans: int  # block files that no row names
    jobs_queued: int  # found running
    jobs_given_up: int
    documents_queued: int  # pending ones that no job spoke of


class Store:
    """Made by `Store.open`; close it, or use it as a context manager. Thread-safe.

    Attributes:
        reserve: to be spent on what makes room on a full disk.
    """

    def __init__(
        self,
        data_dir: Path,
        database: Database,
        reserve: SpaceReserve,
        *,
        upgrade: bool,
        caps: Caps,
        held: ExitStack,
    ) -> None:
        """`Store.open` calls this under the store's lock; what is acquired goes into `held`."""
        _check_settings(database.settings())
        take_advisory_lock(database, held, patience=database.busy_seconds)
        if (data_dir / "STORE").exists() and schema_revision(database).current is None:
            raise _another_database()  # before anything is written to it
        schema = require_schema(database, upgrade=upgrade)
        take_keys_back(database, data_dir)
        self.data_dir = data_dir
        self.database = database
        self.catalog = Catalog(database)
        self.store_id = _pair(data_dir, self.catalog)
        epoch = self.catalog.take_over()
        self.chunks = ChunkStore(data_dir, self.catalog, caps)
        held.callback(self.chunks.close)
        self.jobs = Jobs(database)
        held.callback(self.jobs.close)
        self.recovery = self._recover(schema, epoch)
        self.indexes = VectorIndexes(data_dir / "indexes", self.temporary_path, self.store_id, self.catalog)
        self.upkeep = Upkeep(data_dir, database, self.catalog, self.chunks, self.indexes, reserve)
        self.uses = Uses(self.catalog)
        self.snapshots = Snapshots(data_dir, self.store_id, database, self.catalog)
        self._end_interrupted_copies()
        self.reserve = reserve
        self.reserve.fill(leaving=RESERVE_BYTES)
        self._held = held
        self._closed = False

    @classmethod
    def open(
        cls,
        data_dir: Path,
        database_url: str | None = None,
        *,
        upgrade: bool = False,
        busy_seconds: float = 5.0,
        caps: Caps = NO_CAPS,
    ) -> Store:
        """Locks, migrates (an empty database, or any older one with `upgrade`), recovers.

        Raises:
            StoreLocked: another process has it open; its pid is named.
            MigrationNeeded: the schema is older, or newer than this program.
            DatabaseUnavailable, DatabaseDamaged: the database cannot be used.
            ConfigError: the directory or URL cannot be used, or the two do not belong together.
        """
        data_dir = Path(os.path.abspath(data_dir))
        url = parse_database_url(database_url, data_dir)
        _make_directories(data_dir)
        with ExitStack() as held:
            held.callback(StoreLock(data_dir / "lock").release)
            reserve = SpaceReserve(data_dir / "reserve")
            held.callback(reserve.fill)
            reserve.give_way()
            database = Database(url, busy_seconds=busy_seconds)
            held.callback(database.close)
            store = cls(data_dir, database, reserve, upgrade=upgrade, caps=caps, held=held)
            store._held = held.pop_all()
        return store

    def close(self) -> None:
        """Saves the indexes and lets go of everything. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with suppress(MemKVError):  # a full disk costs a rebuild, not the shutdown
            self.indexes.save_all()
        with suppress(MemKVError):
            self.uses.flush()
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def temporary_path(self) -> Path:
        """A fresh name on the disk of the block files."""
        return self.data_dir / "tmp" / uuid.uuid4().hex

    def accept_documents(self, tenant: str, collection_id: str, documents: Sequence[NewDocument]) -> Accepted:
        """`Catalog.accept_documents`, and wakes the workers. Once it returns, the texts are never lost."""
        accepted = self.catalog.accept_documents(tenant, collection_id, documents)
        if accepted.job is not None:
            self.jobs.announce()
        return accepted

    def commit_document(
        self, tenant: str, document_id: str, revision: int, chunks: Sequence[NewChunk]
    ) -> Committed:
        """`Catalog.commit_document`, then the index, then the files of keys that fell out of use.

        Once it returns with outcome `ready`, a search finds the new chunks and none of the old ones.
        """
        committed = self.catalog.commit_document(tenant, document_id, revision, chunks)
        if committed.change is not None:
            self._follow(tenant, committed.change)
        return committed

    def delete_document(self, tenant: str, collection_id: str, document: str) -> Change:
        """Once it returns, no search finds the document. Raises DocumentNotFound."""
        change = self.reserve.spend_on(lambda: self.catalog.delete_document(tenant, collection_id, document))
        self._follow(tenant, change)
        self.reserve.fill()
        return change

    def delete_collection(self, tenant: str, name: str) -> DeletedCollection:
        """Raises CollectionNotFound."""
        deleted = self.reserve.spend_on(lambda: self.catalog.delete_collection(tenant, name))
        self.indexes.drop(deleted.collection_id)
        self.chunks.reclaim(deleted.released.files)
        self.reserve.fill()
        self.jobs.announce()
        return deleted

    def renew_collection(
        self, row: CollectionRow, new: NewCollection, arguments: Mapping[str, object] | None = None
    ) -> RenewedCollection:
        """`Catalog.renew_collection`, then the index and the files, and wakes the workers."""
        renewed = self.catalog.renew_collection(row, new, arguments)
        self.indexes.drop(row.id)
        self.chunks.reclaim(renewed.released.files)
        self.jobs.announce()
        return renewed

    def search(
        self,
        collection: CollectionRow,
        vector: NDArray[np.float32],
        k: int,
        *,
        filter: object = None,
        min_score: float | None = None,
    ) -> list[SearchHit]:
        """`search_collection`; `filter` is what `parse_filter` reads. Raises FilterError, BadRequestError."""
        return search_collection(
            self.catalog,
            self.indexes,
            collection,
            vector,
            k,
            matching=parse_filter(filter),
            min_score=min_score,
        )

    def verify(
        self,
        *,
        full: bool = False,
        repair: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[StoreProblem]:
        """Everything that is wrong; see `verify_until`."""
        return self.verify_until(inf, full=full, repair=repair, on_progress=on_progress).problems

    def verify_until(
        self,
        deadline: float,
        *,
        full: bool = False,
        repair: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Verified:
        """Checks database, index files, then block files (all bytes with `full`) until `deadline`.

        Changes nothing unless `repair` says so, but for when each file was read last.

        Args:
            deadline: of `time.monotonic`; it bounds block files alone, and one is looked at in any case.
            on_progress: told (block files looked at, block files).
        """
        wrong = [StoreProblem("database", "", line, False) for line in self.database.find_damage()]
        for collection in self.catalog.all_collections():
            damage = self.indexes.check(collection)
            if damage is not None:
                repaired = repair and self._renew_index(collection)
                wrong.append(StoreProblem("index", collection.name, damage.detail, repaired))
        verified = verify_files(
            self.chunks, self.catalog, full=full, repair=repair, deadline=deadline, on_progress=on_progress
        )
        verified.problems[:0] = wrong
        return verified

    def stats(self) -> dict[str, object]:
        """Plain values, for /v1/store/stats and `memkv store stats`."""
        files, size = self.catalog.kv_totals()
        settings = self.database.settings()
        return {
            "store_id": self.store_id,
            "data_dir": str(self.data_dir),
            "generation": self.catalog.generation(),
            "database": settings,
            "warnings": durability_warnings(settings),
            **self.catalog.totals(),
            "kv_files": files,
            "kv_bytes": size,
            "chunk_store": self.chunks.stats(),
            "indexes": self.indexes.stats(),
            "recovery": asdict(self.recovery),
        }

    def _renew_index(self, collection: CollectionRow) -> bool:
        self.indexes.get(collection)
        try:
            return self.indexes.save(collection.id)
        except MemKVError:
            return False

    def _recover(self, schema: SchemaRevision, epoch: int) -> Recovery:
        files = self.chunks.recover()
        queued, given_up = self.jobs.requeue_left_behind()
        stray = self.catalog.pending_documents()
        if stray:
            self.catalog.queue_documents(stray)
        return Recovery(
            schema=schema,
            epoch=epoch,
            drafts_removed=files.drafts_removed,
            rows_dropped=files.rows_dropped,
            orphans=files.orphans,
            jobs_queued=queued,
            jobs_given_up=given_up,
            documents_queued=len(stray),
        )

    def _end_interrupted_copies(self) -> None:
        """Jobs that were killed, or copied, between their deed and their end: now it is known what was done,
        later a snapshot may be deleted.
        """
        if (restored := read_journal(self.data_dir)) is not None:
            tell_restored(self.database, restored)
        remove_journal(self.data_dir)
        for job in self.jobs.queued(SNAPSHOT):
            made = self.snapshots.find(str(job.arguments["snapshot"]))
            if made is not None:
                self.jobs.finish(job.id, "succeeded", counts={"snapshot": asdict(made)})

    def _follow(self, tenant: str, change: Change) -> None:
        self.indexes.apply(tenant, change)
        if change.released.files:
            self.chunks.reclaim(change.released.files)


def _make_directories(data_dir: Path) -> None:
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in _DIRECTORIES:
            path = data_dir / name
            path.mkdir(mode=0o700, exist_ok=True)
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise ConfigError(
                    f"{name}/ of the data directory is a link", hint="move the whole data directory instead"
                )
        sync_directory(data_dir)
    except OSError as error:
        raise ConfigError(
            f"the data directory {data_dir} cannot be used: {error.strerror}",
            hint="choose another one (MEMKV_DATA_DIR), or check its owner and permissions",
        ) from error


def _check_settings(settings: dict[str, object]) -> None:
    if settings["dialect"] == "sqlite":
        mode = "wal" if settings["journal_mode"] == "wal" else "other"
        if settings["synchronous"] != _DURABLE_SYNCHRONOUS[mode] or settings["foreign_keys"] != 1:
            raise ConfigError(
                f"SQLite does not keep its settings: {settings}", hint="install pysqlite3, or use PostgreSQL"
            )
    elif settings["server_encoding"] != "UTF8":
        raise ConfigError(
            f"the database's encoding is {settings['server_encoding']}", hint="create it with ENCODING 'UTF8'"
        )


def durability_warnings(settings: dict[str, object]) -> list[str]:
    """What makes this database less durable than it could be."""
    found = []
    if settings["dialect"] == "sqlite":
        if settings["journal_mode"] != "wal":
            found.append("SQLite cannot use WAL here: writers block readers")
    else:
        if settings["fsync"] != "on":
            found.append("PostgreSQL runs with fsync off: a power cut loses documents")
        if settings["data_checksums"] != "on":
            found.append("PostgreSQL runs without data checksums: damage stays unseen")
    return found


def _another_database() -> ConfigError:
    return ConfigError(
        "this data directory belongs to another database: the one it is opened with is empty",
        hint="choose another data directory (MEMKV_DATA_DIR) or database (MEMKV_DATABASE_URL), or restore it",
    )


def _pair(data_dir: Path, catalog: Catalog) -> str:
    """The store's id, the same in STORE and in the database. STORE is written after the database knows it."""
    path = data_dir / "STORE"
    named, known = _read_store_file(path), catalog.store_id()
    if known is None:
        if path.exists():
            raise _another_database()
        known = uuid.uuid4().hex
        catalog.create_store(known)
    if named is not None and named != known:
        raise ConfigError(
            "this data directory belongs to another database",
            hint="check MEMKV_DATA_DIR and MEMKV_DATABASE_URL",
        )
    if named is None:
        text = json.dumps({"store_id": known, "format_version": FORMAT_VERSION}) + "\n"
        replace_file(path, data_dir / "tmp" / uuid.uuid4().hex, [text.encode()])
    return known


def _read_store_file(path: Path) -> str | None:
    """The id; None where there is no such file, or one that says nothing."""
    data = read_file(path, limit=4096)
    if isinstance(data, Damage):
        return None
    try:
        content = json.loads(bytes(data))
        version, store_id = content["format_version"], uuid.UUID(hex=content["store_id"]).hex
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if version != FORMAT_VERSION:
        raise MigrationNeeded(
            f"the data directory has format {version}, this memkv knows {FORMAT_VERSION}",
            hint="install the memkv that made it",
        )
    return store_id
