"""States that hardly any store is ever in: values that cannot be, rows that go while they are looked at."""

from __future__ import annotations

import runpy
import sqlite3
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from store_samples import (
    OpenStore,
    found_texts,
    ingest,
    is_exact,
    new_collection,
    path_of,
    samples_of,
)

from memkv.errors import (
    BadRequestError,
    CollectionNotFound,
    ConfigError,
    DatabaseDamaged,
    DatabaseUnavailable,
    InsufficientStorageError,
    MigrationNeeded,
)
from memkv.store import DEFAULT_TENANT, Store, chunk_store, schema, store, upkeep
from memkv.store import database as database_module
from memkv.store.block_file import BlockFileIdentity
from memkv.store.catalog import Catalog
from memkv.store.database import Database, parse_database_url
from memkv.store.database_errors import translate
from memkv.store.durable_files import Damage, write_new_file
from memkv.store.filters import MAX_COMPARISONS, parse_filter
from memkv.store.plain_values import MAX_METADATA_BYTES, checked_metadata, checked_text
from memkv.store.quota import Caps
from memkv.store.rows import CollectionRow, DocumentRow, NewDocument
from memkv.store.schema import require_schema, schema_revision
from memkv.store.verification import Scrubbed, scrub

T = DEFAULT_TENANT
GONE = "does not exist any more"


def execute(store: Store, statement: str, **values: object) -> None:
    with store.database.write() as transaction:
        transaction.connection.execute(text(statement), values)


# Rows


def test_a_collection_that_goes_while_it_is_deleted_or_renewed(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.delete_collection(T, collection.name)
    monkeypatch.setattr(store.catalog, "get_collection", lambda *_: collection)  # as it was a moment ago
    with pytest.raises(CollectionNotFound, match=GONE):
        store.catalog.delete_collection(T, collection.name)
    with pytest.raises(CollectionNotFound, match=GONE):
        store.renew_collection(collection, new_collection())
    assert store.catalog.vectors(T, collection.id) is None


def test_an_empty_collection_is_renewed_without_a_job(store: Store, collection: CollectionRow) -> None:
    renewed = store.renew_collection(collection, new_collection(fingerprint_digest="6b" * 32))
    assert renewed.job is None
    assert store.catalog.get_collection(T, collection.name).fingerprint_digest == "6b" * 32


def test_a_collection_is_changed_where_something_is_given(store: Store, collection: CollectionRow) -> None:
    before = store.catalog.generation()
    assert store.catalog.update_collection(T, collection.name) == collection
    assert store.catalog.generation() == before, "nothing was to be written"
    changed = store.catalog.update_collection(T, collection.name, description="new", max_kv_bytes=7)
    assert (changed.description, changed.max_kv_bytes, changed.prefill) == ("new", 7, collection.prefill)
    assert store.catalog.all_collections() == [changed]


def test_values_that_cannot_be_stored_are_refused(store: Store, collection: CollectionRow) -> None:
    with pytest.raises(BadRequestError, match="digest"):
        store.catalog.create_collection(T, new_collection("x", fingerprint_digest="short"))
    with pytest.raises(BadRequestError, match="external_id is blank"):
        store.accept_documents(T, collection.id, [NewDocument("a", external_id=" ")])
    with pytest.raises(BadRequestError, match="not a string"):
        checked_text("the name", 7, max_chars=9)  # type: ignore[arg-type]
    with pytest.raises(BadRequestError, match="bytes"):
        checked_metadata("metadata", {"k": "x" * MAX_METADATA_BYTES})
    with pytest.raises(BadRequestError, match="comparisons"):
        parse_filter({"type": "or", "filters": [{f"k{n}": n for n in range(MAX_COMPARISONS + 1)}]})


def test_a_document_without_chunks_is_ready_and_never_found(store: Store, collection: CollectionRow) -> None:
    accepted = store.accept_documents(T, collection.id, [NewDocument("blank", external_id="d")])
    document = accepted.documents[0].document
    committed = store.commit_document(T, document.id, document.revision, [])
    assert committed.outcome == "ready"
    assert store.catalog.get_document(T, collection.id, "d").num_chunks == 0
    assert found_texts(store, collection, "blank") == []


@pytest.mark.parametrize(
    ("column", "what", "read"),
    [
        ("chunks SET token_ids", "token ids", lambda found, row: found.chunks_of(T, row.id)),
        ("chunks SET embedding", "vector", lambda found, row: found.vectors(T, row.collection_id)),
        ("tenants SET secret", "secret", lambda found, _: found.tenant_secret(T)),
    ],
)
def test_values_of_a_wrong_length_are_damage(
    open_store: OpenStore, column: str, what: str, read: Callable[[Catalog, DocumentRow], object]
) -> None:
    store = open_store()
    document = ingest(store, store.catalog.create_collection(T, new_collection()), "text")
    execute(store, f"UPDATE {column} = :odd", odd=b"odd")
    store.close()
    store = open_store()  # which knows nothing of them yet
    with pytest.raises(DatabaseDamaged, match=what):
        read(store.catalog, document)


def test_a_time_that_cannot_be_is_damage(store: Store, collection: CollectionRow) -> None:
    execute(store, "UPDATE collections SET created_at = 9223372036854775807")
    with pytest.raises(DatabaseDamaged, match="time"):
        store.catalog.get_collection(T, collection.name)


def test_a_store_without_its_row_is_not_opened(open_store: OpenStore) -> None:
    store = open_store()
    execute(store, "DELETE FROM store")
    with pytest.raises(DatabaseDamaged, match="row is gone"):
        store.catalog.take_over()
    store.close()
    with pytest.raises(ConfigError, match="another database"):
        open_store()


# Schema


def test_tables_without_a_revision_are_not_touched(tmp_path: Path) -> None:
    database = Database(parse_database_url(None, tmp_path))
    require_schema(database, upgrade=True)
    with database.unfenced_write() as connection:
        connection.execute(text("DROP TABLE alembic_version"))
    with pytest.raises(MigrationNeeded, match="does not know"):
        require_schema(database, upgrade=True)
    database.close()


def test_an_empty_database_has_nothing_to_downgrade(tmp_path: Path) -> None:
    database = Database(parse_database_url(None, tmp_path))
    with pytest.raises(MigrationNeeded, match="empty"):
        schema.downgrade_schema(database, "0001")
    database.close()


def test_a_schema_that_another_process_brings_to_head_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(parse_database_url(None, tmp_path))
    seen = schema_revision(database)
    require_schema(database, upgrade=True)
    monkeypatch.setattr(schema, "schema_revision", lambda _: seen)  # as it was a moment ago
    assert require_schema(database, upgrade=True).is_current
    database.close()


# Drivers


def test_sqlite_of_python_takes_the_place_of_one_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pysqlite3", None)
    found = runpy.run_path(str(database_module.__file__))
    assert found["sqlite_driver"] is sqlite3


def test_postgresql_without_its_driver_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match="driver is not installed"):
        Database(parse_database_url("postgresql://nobody@localhost/none", tmp_path))


def test_a_copy_that_cannot_be_written_is_the_databases_error(plain_store: Store, tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailable, match="cannot be read or written"):
        plain_store.database.copy_to(tmp_path / "nowhere" / "copy")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("XX001", DatabaseDamaged),
        ("23505", DatabaseDamaged),
        ("53100", InsufficientStorageError),
        ("55P03", DatabaseUnavailable),
        ("28P01", DatabaseUnavailable),
        ("3D000", DatabaseUnavailable),
        ("57P01", DatabaseUnavailable),
        ("42601", None),
    ],
)
def test_every_state_of_postgresql_has_its_error(code: str, expected: type | None) -> None:
    error = psycopg.errors.lookup(code)() if code != "53100" else psycopg.errors.DiskFull()
    found = translate(error)
    assert found is None if expected is None else isinstance(found, expected)


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        (11, "malformed", DatabaseDamaged),
        (1, "no such table: chunks", DatabaseDamaged),
        (1, "Could not decode to UTF-8 column", DatabaseDamaged),
        (19, "UNIQUE constraint failed", DatabaseDamaged),
        (13, "database or disk is full", InsufficientStorageError),
        (5, "database is locked", DatabaseUnavailable),
        (14, "unable to open database file", DatabaseUnavailable),
        (1, "near SELEC: syntax error", None),
    ],
)
def test_every_code_of_sqlite_has_its_error(code: int, words: str, expected: type | None) -> None:
    error = sqlite3.OperationalError(words)
    error.sqlite_errorcode = code
    found = translate(error)
    assert found is None if expected is None else isinstance(found, expected)


# Settings


def test_settings_that_durability_rests_on_are_demanded_and_told() -> None:
    sqlite = {"dialect": "sqlite", "journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    postgres = {"dialect": "postgresql", "server_encoding": "UTF8", "fsync": "on", "data_checksums": "on"}
    for sound in (sqlite, postgres):
        store._check_settings(sound)
        assert store.durability_warnings(sound) == []
    for unsound in ({**sqlite, "synchronous": 1}, {**sqlite, "foreign_keys": 0}):
        with pytest.raises(ConfigError, match="does not keep its settings"):
            store._check_settings(unsound)
    with pytest.raises(ConfigError, match="encoding"):
        store._check_settings({**postgres, "server_encoding": "SQL_ASCII"})
    without_wal = {**sqlite, "journal_mode": "delete", "synchronous": 3}
    store._check_settings(without_wal)
    weak = {**postgres, "fsync": "off", "data_checksums": "off"}
    assert [len(store.durability_warnings(each)) for each in (without_wal, weak)] == [1, 2]


# Files


def test_an_empty_file_is_written_as_one(tmp_path: Path) -> None:
    write_new_file(tmp_path / "empty", [], mode=0o600)
    assert (tmp_path / "empty").read_bytes() == b""


def test_what_cannot_be_set_right_is_said_so(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone while it was looked at, unreadable for now, or in the place of a directory."""
    ingest(store, collection, "text")
    [row] = store.catalog.files_of_all_tenants()
    assert not store.chunks.set_right(row, Damage("unreadable", "for now", transient=True))
    path = store.chunks.path(row)
    path.unlink()
    assert not store.chunks.set_right(row, Damage("mode", "its mode is 644"))
    assert store.chunks._directory.size_of(path.name) == 0
    assert not store.chunks._directory.quarantine(path, Damage("size", "1 byte"))
    path.parent.rmdir()
    path.parent.write_bytes(b"")
    damage = store.chunks.check(row, full=False)
    assert damage is not None
    assert (damage.kind, damage.transient) == ("unreadable", True)
    assert upkeep._size(path) == 0


def test_a_file_that_was_published_again_is_not_reclaimed(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "text")
    [row] = store.catalog.files_of_all_tenants()
    assert store.chunks.reclaim([row]) == 0
    assert store.chunks.path(row).exists()
    assert store.chunks.release_unused(T, [row.input_key]).files == ()


def test_a_file_that_is_healed_while_it_is_looked_at_is_used(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(store, collection, "text")
    [sample] = samples_of(store, "text")
    read, seen = chunk_store.read_block_file, []

    def damaged_once(path: Path, identity: BlockFileIdentity, digest: str) -> object:
        seen.append(path)
        return Damage("digest", "another's bytes") if len(seen) == 1 else read(path, identity, digest)

    monkeypatch.setattr(chunk_store, "read_block_file", damaged_once)
    assert is_exact(store, sample)
    assert path_of(store, sample.item).exists()


def test_an_index_that_finds_no_room_is_not_called_repaired(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(store, collection, "text")
    found_texts(store, collection, "text")
    store.indexes.save_all()
    [file] = (store.data_dir / "indexes").iterdir()
    file.write_bytes(b"no index")

    def full(_: str) -> bool:
        raise InsufficientStorageError("full", hint="")

    monkeypatch.setattr(store.indexes, "save", full)
    [problem] = store.verify(repair=True)
    assert (problem.kind, problem.repaired) == ("index", False)


# Limits


def test_room_is_demanded_before_anything_is_computed(open_store: OpenStore) -> None:
    store = open_store(caps=Caps(store=1000, tenant=500))
    collection = store.catalog.create_collection(T, new_collection())
    store.chunks.quota.require(T, collection.id, 500)
    with pytest.raises(InsufficientStorageError, match="the tenant holds 0"):
        store.chunks.quota.require(T, collection.id, 501)
    assert store.chunks.quota.room(T, collection.id) == 500


def test_the_scrubber_ends_when_it_is_told_to(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "one\ntwo\nthree")
    stop = threading.Event()
    stop.set()
    seen = scrub(store.chunks, store.catalog, older_than=timedelta(0), bytes_per_second=1, stop=stop)
    assert seen.files == 1
    seen.add(Scrubbed(files=2, bytes=10, damaged=1))
    assert (seen.files, seen.damaged) == (3, 1)


def test_progress_that_is_due_is_written(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = store.accept_documents(T, collection.id, [NewDocument("a")])
    assert accepted.job is not None
    store.jobs.claim("w")
    monkeypatch.setattr("memkv.store.jobs._FLUSH_SECONDS", 0.0)
    store.jobs.progress(accepted.job.id, stage="embedding", done=1, total=3, unit="bytes")
    with store.database.read() as connection:
        [row] = connection.execute(text("SELECT stage, done, total FROM jobs")).all()
    assert tuple(row) == ("embedding", 1, 3)
