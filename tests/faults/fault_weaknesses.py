"""Protections switched off, one at a time, in a process under test: the negative controls.

Nothing of this is an option of memkv; each is a patch of the running process.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from fault_kill_weaknesses import KILL_WEAKNESSES
from sqlalchemy import event

from memkv.engine import engine
from memkv.engine.residency import Pin
from memkv.errors import InternalServerError, MemKVError
from memkv.kv.chunk import ChunkKV
from memkv.kv.fingerprint import Fingerprint
from memkv.memory.stored import StoredMemory
from memkv.store import backup, block_file, chunk_store, database, durable_files, store, vector_index
from memkv.store.catalog import Catalog
from memkv.store.chunk_store import ChunkStore, Recovered
from memkv.store.durable_files import Damage
from memkv.store.jobs import Jobs
from memkv.store.rows import KVFileRow


def switch_off(name: str) -> None:
    """Switches one off for good in this process; an empty name switches nothing off."""
    if name:
        WEAKNESSES[name.partition(":")[0]](*name.split(":")[1:])


def _rows_before_files() -> None:
    """A row may name a file that is not there, and no opening notices."""

    def rows_first(self: ChunkStore, drafts: Any) -> Any:
        added = self._catalog.register_files([draft.row for draft in drafts])
        for draft in drafts:
            self._directory.link(draft.path, draft.row, draft.identity)
        return added

    ChunkStore._make_visible = rows_first  # type: ignore[method-assign]
    _no_recovery()


def _no_recovery() -> None:
    ChunkStore.recover = lambda _: Recovered(0, 0, 0)  # type: ignore[method-assign]


def _files_before_rows_go() -> None:
    """Reclaiming unlinks first and drops the row after it."""
    evict = ChunkStore.evict

    def files_first(self: ChunkStore, rows: Any) -> int:
        for row in rows:
            self._directory.path(row).unlink(missing_ok=True)
        return evict(self, rows)

    ChunkStore.evict = files_first  # type: ignore[method-assign]
    _no_recovery()


def _no_verification() -> None:
    """Block files are taken as they are."""

    def read(path: Any, identity: Any, _digest: str) -> ChunkKV | Damage:
        data = durable_files.read_file(path)
        if isinstance(data, Damage):
            return data
        size = identity.layout.bytes_for(identity.num_tokens)
        body = bytes(data[identity.header_bytes :])[:size].ljust(size, b"\0")
        return ChunkKV(identity.layout, identity.num_tokens, body)

    def believed(_path: Any, _row: KVFileRow) -> None:
        return None

    block_file.read_block_file = chunk_store.read_block_file = read
    chunk_store.check_block_file = believed


def _no_fsync() -> None:
    """Files and directories are left to the system; the database keeps its own."""
    os.fsync = lambda _: None  # type: ignore[assignment]


def _synchronous_off() -> None:
    """SQLite leaves its log to the system."""
    _sqlite_pragma("PRAGMA synchronous=OFF")
    store._check_settings = lambda _: None


def _synchronous_normal() -> None:
    _sqlite_pragma("PRAGMA synchronous=NORMAL")
    store._check_settings = lambda _: None


def _sqlite_pragma(statement: str) -> None:
    plain = database._sqlite_engine

    def weakened(*arguments: Any) -> Any:
        engine = plain(*arguments)
        event.listen(engine, "connect", lambda connection, _: connection.execute(statement))
        return engine

    database._sqlite_engine = weakened


def _unchecked_index() -> None:
    """Index files are taken as they are."""
    plain = vector_index._digest
    vector_index._digest = lambda *parts: _Any(plain(*parts))  # type: ignore[assignment]


class _Any(bytes):
    """Digests that equal everything."""

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = bytes.__hash__


def _fingerprint_without(field: str) -> None:
    """The fingerprint forgets one field."""
    plain = Fingerprint.canonical_json

    def without(self: Fingerprint) -> str:
        return plain(replace(self, **{field: 0}))  # type: ignore[arg-type]

    Fingerprint.canonical_json = without  # type: ignore[method-assign]


def _driver_transactions() -> None:
    """SQLite's driver begins transactions itself, which it does not do for DDL."""
    plain = database._sqlite_engine

    def weakened(url: Any, busy_seconds: float) -> Any:
        engine = plain(url, busy_seconds)
        event.listen(
            engine, "connect", lambda connection, _: setattr(connection, "isolation_level", "DEFERRED")
        )
        for listener in list(engine.dispatch.begin):
            event.remove(engine, "begin", listener)
        return engine

    database._sqlite_engine = weakened


def _no_requeue() -> None:
    """Jobs that a killed process left behind stay where they are, and so do their documents."""
    Jobs.requeue_left_behind = lambda _: (0, 0)  # type: ignore[method-assign]
    Catalog.pending_documents = lambda _: []  # type: ignore[method-assign]


def _deletes_late() -> None:
    """A deletion is acknowledged half a second before it is done."""
    forget = StoredMemory.forget

    def late(self: StoredMemory, collection: str, document: str, **options: Any) -> None:
        found = self.get_document(collection, document, **options)

        def carry_out() -> None:
            with suppress(MemKVError):
                forget(self, collection, found.id, **options)

        threading.Timer(0.5, carry_out).start()

    StoredMemory.forget = late  # type: ignore[method-assign]


def _no_admission() -> None:
    """What can never fit is let in."""
    engine.require_blocks = lambda *_: None


def _slow_start() -> None:
    recover = ChunkStore.recover

    def slow(self: ChunkStore) -> Recovered:
        time.sleep(3.0)
        return recover(self)

    ChunkStore.recover = slow  # type: ignore[method-assign]


def _leaking_pins() -> None:
    """Every tenth pin is never released."""
    release = Pin.release
    count = itertools.count(1)

    def sometimes(self: Pin, **options: Any) -> None:
        if next(count) % 10:
            release(self, **options)

    Pin.release = sometimes  # type: ignore[method-assign,assignment]


def _full_disk_is_an_accident() -> None:
    """What the disk refuses for want of room is told as any other failure, and not tried again."""

    def accident(_: OSError) -> MemKVError:
        return InternalServerError("writing failed")

    durable_files.storage_error = chunk_store.storage_error = accident


def _autocommit_migrations() -> None:
    """Each statement is a transaction of its own."""

    @contextmanager
    def unfenced(self: database.Database) -> Iterator[Any]:
        with self.hold_connection() as connection:
            yield connection

    database.Database.unfenced_write = unfenced  # type: ignore[method-assign,assignment]


def _restore_forgets_the_log() -> None:
    """What only SQLite's log holds is not in the database when the log goes."""
    backup._end_log = lambda _: None


WEAKNESSES: dict[str, Callable[..., None]] = {
    **KILL_WEAKNESSES,
    "rows_before_files": _rows_before_files,
    "no_recovery": _no_recovery,
    "files_before_rows_go": _files_before_rows_go,
    "no_verification": _no_verification,
    "no_fsync": _no_fsync,
    "synchronous_off": _synchronous_off,
    "synchronous_normal": _synchronous_normal,
    "unchecked_index": _unchecked_index,
    "fingerprint_without": _fingerprint_without,
    "driver_transactions": _driver_transactions,
    "no_requeue": _no_requeue,
    "deletes_late": _deletes_late,
    "no_admission": _no_admission,
    "full_disk_is_an_accident": _full_disk_is_an_accident,
    "autocommit_migrations": _autocommit_migrations,
    "restore_forgets_the_log": _restore_forgets_the_log,
    "slow_start": _slow_start,
    "leaking_pins": _leaking_pins,
}
