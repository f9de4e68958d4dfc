"""Protections against a kill switched off, one at a time: what a careless build would do in the same place.

Each leaves nothing wrong behind unless the process is killed in the middle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fault_closed
from sqlalchemy import delete, insert, select

from memkv.store.catalog import Catalog
from memkv.store.catalog_chunks import remove_chunks
from memkv.store.chunk_store import ChunkStore, Recovered
from memkv.store.database import Database
from memkv.store.durable_files import Damage
from memkv.store.rows import Change, KVFileRow, Released
from memkv.store.snapshots import Snapshot, Snapshots
from memkv.store.tables import Chunk
from memkv.store.upkeep import Tell, Upkeep


def _deletes_in_two_steps() -> None:
    """A document's chunks go in one transaction, the document in the next."""
    delete_document = Catalog.delete_document

    def in_two(self: Catalog, tenant: str, collection_id: str, document: str) -> Change:
        row = self.get_document(tenant, collection_id, document)
        with self._database.write() as transaction:
            remove_chunks(transaction.connection, tenant, row.id)
        return delete_document(self, tenant, collection_id, document)

    Catalog.delete_document = in_two  # type: ignore[method-assign]


def _garbage_before_rows_go() -> None:
    """Garbage collection unlinks first and drops the row after it."""
    release_unused = ChunkStore.release_unused

    def files_first(self: ChunkStore, tenant: str, input_keys: Sequence[str]) -> Released:
        for row in self._catalog.unused_files():
            if row.input_key in input_keys:
                self._directory.path(row).unlink(missing_ok=True)
        return release_unused(self, tenant, input_keys)

    ChunkStore.release_unused = files_first  # type: ignore[method-assign]


def _compaction_empties_first() -> None:
    """A table is emptied and filled again, in two transactions."""

    def by_hand(self: Database) -> None:
        table = Chunk.__table__
        with self.unfenced_write() as connection:
            rows = [dict(row) for row in connection.execute(select(table)).mappings()]
            connection.execute(delete(Chunk))
        if rows:
            with self.unfenced_write() as connection:
                connection.execute(insert(Chunk).values(rows))

    Database.compact = by_hand  # type: ignore[method-assign]


def _snapshot_in_place() -> None:
    """A snapshot has its name before it is whole."""

    def in_place(self: Snapshots, snapshot_id: str, *, on_progress: Tell) -> Snapshot:
        place = self._root / snapshot_id
        place.mkdir(mode=0o700, parents=True)
        return self._fill(place, snapshot_id, on_progress)

    Snapshots.create = in_place  # type: ignore[method-assign]


def _quarantine_before_row() -> None:
    """A damaged file is set aside first and its row dropped after it."""

    def file_first(self: ChunkStore, row: KVFileRow, damage: Damage) -> bool:
        if damage.kind != "missing":
            self._directory.quarantine(self._directory.path(row), damage)
        self._catalog.drop_file(row.tenant, row.input_key, row.file_digest)
        return True

    ChunkStore._discard_locked = file_first  # type: ignore[method-assign]


def _reasons_go_last() -> None:
    """Emptying the quarantine removes each file first and what says why it is there after it."""

    def file_first(self: Upkeep, **_: Any) -> Any:
        for file in self.quarantined():
            (self._quarantine / file.name).unlink()
            (self._quarantine / f"{file.name}.json").unlink(missing_ok=True)
        return plan(self, dry_run=True)

    plan = Upkeep.purge_quarantine
    Upkeep.purge_quarantine = file_first  # type: ignore[method-assign]


def _recovers_once() -> None:
    """An opening that was begun counts as made: the next one recovers nothing."""
    recover = ChunkStore.recover

    def once(self: ChunkStore) -> Recovered:
        begun = self._directory.blocks.with_name("recovering")
        if begun.exists():
            return Recovered(0, 0, 0)
        begun.touch()
        recovered = recover(self)
        begun.unlink()
        return recovered

    ChunkStore.recover = once  # type: ignore[method-assign]


def _backup_in_place() -> None:
    """A backup has its name before it is whole."""

    def in_place(database: Database, path: Path) -> int:
        database.copy_to(path)
        return os.path.getsize(path)

    fault_closed.back_up = in_place  # type: ignore[assignment]


KILL_WEAKNESSES: dict[str, Callable[[], None]] = {
    "deletes_in_two_steps": _deletes_in_two_steps,
    "garbage_before_rows_go": _garbage_before_rows_go,
    "compaction_empties_first": _compaction_empties_first,
    "snapshot_in_place": _snapshot_in_place,
    "quarantine_before_row": _quarantine_before_row,
    "reasons_go_last": _reasons_go_last,
    "recovers_once": _recovers_once,
    "backup_in_place": _backup_in_place,
}
