"""Transactions, fencing and what becomes of a database's errors."""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from postgres_server import PostgresServer
from sqlalchemy import text
from store_samples import OpenStore, found_texts, ingest, load, new_collection, samples_of

from memkv.errors import (
    ConfigError,
    DatabaseDamaged,
    DatabaseUnavailable,
    MemKVError,
    StoreFenced,
)
from memkv.store import DEFAULT_TENANT, Store
from memkv.store import database as database_module
from memkv.store.database import Database, parse_database_url, sqlite_driver
from memkv.store.database_errors import translate
from memkv.store.rows import CollectionRow, NewDocument, PageRequest


def test_sqlite_runs_with_durable_settings(tmp_path: Path) -> None:
    with Store.open(tmp_path / "data") as store:
        found = store.database.settings()
        assert found["journal_mode"] == "wal"
        assert (found["synchronous"], found["foreign_keys"]) == (2, 1)
        assert sqlite_driver.sqlite_version_info >= (3, 51, 3), "the WAL-reset bug: install pysqlite3"
        shown = store.stats()
        assert shown["database"] == found
        assert shown["warnings"] == []


def test_postgresql_says_what_makes_it_less_durable(postgres_url: str, tmp_path: Path) -> None:
    with Store.open(tmp_path / "data", postgres_url) as store:
        assert store.database.settings()["synchronous_commit"] == "on"
        fsync = store.database.settings()["fsync"]
        assert any("fsync" in warning for warning in store.stats()["warnings"]) == (fsync == "off")  # type: ignore[attr-defined]


def test_a_failed_transaction_leaves_nothing_not_even_a_table(store: Store) -> None:
    generation = store.catalog.generation()

    def fail_half_way() -> None:
        with store.database.write() as transaction:
            transaction.connection.execute(text("CREATE TABLE half (a INTEGER)"))
            transaction.connection.execute(text("UPDATE store SET generation = 999"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    with store.database.read() as connection, pytest.raises(MemKVError):
        connection.execute(text("SELECT * FROM half"))
    assert store.catalog.generation() == generation


def test_a_read_sees_one_snapshot(store: Store, collection: CollectionRow) -> None:
    with store.database.read() as connection:
        before = connection.execute(text("SELECT count(*) FROM documents")).scalar()
        store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument("x")])
        assert connection.execute(text("SELECT count(*) FROM documents")).scalar() == before


def test_writers_of_one_process_take_turns(store: Store, collection: CollectionRow) -> None:
    def add(number: int) -> None:
        for step in range(5):
            store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument(f"{number} {step}")])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    before = store.catalog.generation()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.catalog.generation() == before + 40, "a write transaction was not counted"
    assert store.catalog.count_collection(DEFAULT_TENANT, collection.id).documents == 40


def test_a_store_that_was_taken_over_may_not_write(store: Store, collection: CollectionRow) -> None:
    document = ingest(store, collection, "still readable")
    with store.database.unfenced_write() as connection:  # what another process's opening does
        connection.execute(text("UPDATE store SET epoch = epoch + 1"))
    for write in (
        lambda: store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument("x")]),
        lambda: store.delete_document(DEFAULT_TENANT, collection.id, document.id),
        lambda: store.commit_document(DEFAULT_TENANT, document.id, 1, []),
        lambda: store.jobs.create(DEFAULT_TENANT, collection.id, "ingest", []),
        lambda: store.catalog.create_tenant("other"),
    ):
        with pytest.raises(StoreFenced):
            write()
    assert found_texts(store, collection, "still readable") == ["still readable"]
    assert store.catalog.count_collection(DEFAULT_TENANT, collection.id).ready == 1


@pytest.mark.parametrize("driver", ["pysqlite3", "sqlite3"])
def test_an_old_sqlite_gets_one_connection_and_all_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    monkeypatch.setattr(database_module, "_SQLITE_SAFE_WITH_TWO", (99,))
    if driver == "sqlite3":
        monkeypatch.setattr(database_module, "sqlite_driver", sqlite3)
    with Store.open(tmp_path / "data") as store:
        assert store.database._engine.pool.size() == 1  # type: ignore[attr-defined]
        collection = store.catalog.create_collection(DEFAULT_TENANT, new_collection())

        def work(name: str) -> None:
            for step in range(3):
                ingest(store, collection, f"{name} {step}", external_id=name)
                assert f"{name} {step}" in found_texts(store, collection, name)

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found_texts(store, collection, "x")) == ["a 2", "b 2", "c 2", "d 2"]
        assert store.verify(full=True) == []


@contextmanager
def locked(data_dir: Path, database_url: str | None) -> Iterator[Callable[[], None]]:
    """Someone else's open write transaction; gives a function that ends it."""
    if database_url is None:
        # Through memkv's driver: two SQLite libraries in one process do not see each other's locks.
        with closing(sqlite_driver.connect(data_dir / "memkv.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield other.rollback
    else:
        with psycopg.connect(database_url) as other:
            other.execute("LOCK TABLE store, documents, jobs IN EXCLUSIVE MODE")
            yield other.rollback


def test_a_locked_database_is_waited_for_then_reported_and_read_all_along(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store(busy_seconds=0.5)
    collection = store.catalog.create_collection(DEFAULT_TENANT, new_collection())
    ingest(store, collection, "readable")
    with locked(data_dir, database_url) as unlock:
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable) as caught:
            store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument("x")])
        assert 0.4 < time.monotonic() - began < 5
        assert caught.value.hint
        assert caught.value.__cause__ is not None
        assert found_texts(store, collection, "readable") == ["readable"]
        assert load(store, samples_of(store, "readable")[0].item) is not None
        timer = threading.Timer(0.1, unlock)
        if database_url is not None:  # SQLite's connection belongs to this thread
            timer.start()
        else:
            unlock()
        assert store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument("x")]).job is not None
    assert store.catalog.count_collection(DEFAULT_TENANT, collection.id).documents == 2


def test_a_lost_connection_is_an_error_once_and_then_made_anew(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    name = postgres_url.partition("?")[0].rsplit("/", 1)[1]
    with Store.open(tmp_path / "data", postgres_url) as store:
        collection = store.catalog.create_collection(DEFAULT_TENANT, new_collection())

        def cut() -> None:
            postgres_server.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = %s AND state = 'idle in transaction'",
                (name,),
            )

        def lose_it_within() -> None:
            with store.database.write() as transaction:
                cut()
                transaction.connection.execute(text("UPDATE store SET generation = 999"))

        with pytest.raises(DatabaseUnavailable):
            lose_it_within()
        # At COMMIT the outcome is unknown; the same request again gives one document.
        with pytest.raises(DatabaseUnavailable), store.database.write():
            cut()
        for _ in range(2):
            store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument("x", external_id="once")])
        assert store.catalog.count_collection(DEFAULT_TENANT, collection.id).documents == 1


def test_a_server_that_restarted_while_nobody_asked_is_not_noticed(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    name = postgres_url.partition("?")[0].rsplit("/", 1)[1]
    with Store.open(tmp_path / "data", postgres_url) as store:
        collection = store.catalog.create_collection(DEFAULT_TENANT, new_collection())
        postgres_server.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
            (name,),
        )
        time.sleep(0.1)
        assert ingest(store, collection, "text").status == "ready"


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailable) as caught:
        Store.open(tmp_path / "data", f"postgresql://nobody:secret@/none?host={tmp_path}")
    assert "MEMKV_DATABASE_URL" in caught.value.hint
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:", "oracle+x://", "postgresql+foo://x"],
)
def test_other_urls_are_a_config_error_or_the_default(url: str, tmp_path: Path) -> None:
    if url == "":
        assert parse_database_url(url, tmp_path).database == str(tmp_path / "memkv.db")
    elif url == "postgresql+foo://x":
        assert parse_database_url(url, tmp_path).drivername == "postgresql+psycopg"
    else:
        with pytest.raises(ConfigError):
            parse_database_url(url, tmp_path)


@pytest.mark.parametrize("content", [b"not a database " * 1000, b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_no_database_is_reported_as_damaged(tmp_path: Path, content: bytes) -> None:
    Store.open(tmp_path / "data").close()
    for leftover in ("memkv.db-wal", "memkv.db-shm"):
        (tmp_path / "data" / leftover).unlink(missing_ok=True)
    (tmp_path / "data" / "memkv.db").write_bytes(content)
    with pytest.raises(DatabaseDamaged) as caught:
        Store.open(tmp_path / "data")
    assert "backup" in caught.value.hint


def test_a_missing_or_empty_database_is_not_taken_for_a_new_store(tmp_path: Path) -> None:
    Store.open(tmp_path / "data").close()
    (tmp_path / "data" / "memkv.db").write_bytes(b"")
    with pytest.raises(ConfigError, match="empty") as caught:
        Store.open(tmp_path / "data")
    assert "restore" in caught.value.hint


def test_a_table_that_is_gone_is_damage_not_a_traceback(store: Store, collection: CollectionRow) -> None:
    with store.database.unfenced_write() as connection:
        connection.execute(text("DROP TABLE job_items"))
    with pytest.raises(DatabaseDamaged):
        store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument("x")])


def test_a_database_with_flipped_bytes_never_gives_a_traceback(tmp_path: Path) -> None:
    """Every operation works, or ends in one of memkv's own errors."""
    sound = tmp_path / "sound"
    with Store.open(sound) as store:
        collection = store.catalog.create_collection(DEFAULT_TENANT, new_collection())
        for number in range(8):
            ingest(store, collection, f"document {number}\nhas lines", metadata={"n": number})
    outcomes: dict[str, int] = {}
    dice = random.Random(7)
    for _ in range(16):
        damaged = tmp_path / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(sound, damaged)
        data = bytearray((damaged / "memkv.db").read_bytes())
        for _ in range(30):
            data[dice.randrange(100, len(data))] ^= 1 << dice.randrange(8)
        (damaged / "memkv.db").write_bytes(data)
        try:
            use_all_of(damaged)
            outcome = "worked"
        except MemKVError as error:
            outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes.get("DatabaseDamaged", 0) > 3, f"it did not reach what is read: {outcomes}"


def use_all_of(data_dir: Path) -> None:
    with Store.open(data_dir) as store:
        for collection in store.catalog.list_collections(DEFAULT_TENANT, PageRequest()).rows:
            found_texts(store, collection, "document 1\nhas lines")
            for row in store.catalog.list_documents(DEFAULT_TENANT, collection.id, PageRequest()).rows:
                text = store.catalog.document_text(DEFAULT_TENANT, row.id)[1]
                for sample in samples_of(store, text):
                    load(store, sample.item)
            store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument("x", metadata={"a": 1})])
            store.jobs.list(DEFAULT_TENANT, PageRequest())
        store.verify(full=True)
        store.stats()
        store.delete_collection(DEFAULT_TENANT, "papers")


def test_faults_of_our_own_are_not_blamed_on_the_database() -> None:
    assert translate(sqlite3.ProgrammingError("You did not supply a value for binding")) is None
    assert translate(psycopg.errors.SyntaxError("syntax error")) is None
    assert isinstance(translate(psycopg.OperationalError("connection failed")), DatabaseUnavailable)


def test_threads_beyond_the_pool_wait_and_are_told(tmp_path: Path) -> None:
    database = Database(parse_database_url(None, tmp_path), busy_seconds=0.1)
    with closing(database):
        waiting = [database.read() for _ in range(20)]
        for reader in waiting:
            reader.__enter__()
        with pytest.raises(DatabaseUnavailable), database.read():
            pass
        for reader in waiting:
            reader.__exit__(None, None, None)
        with database.read():
            pass
