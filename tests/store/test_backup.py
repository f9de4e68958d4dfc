"""Copies of the database and the way back: whole or not at all, whatever fails on the way."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from pathlib import Path

import pytest
from sqlalchemy.engine import URL
from store_samples import OpenStore, found_texts, ingest, new_collection

from memkv.errors import ConfigError, DatabaseUnavailable, InsufficientStorageError
from memkv.store import DEFAULT_TENANT, Store, backup
from memkv.store.backup import back_up, restore

T = DEFAULT_TENANT


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_leaves_no_copy(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "sync_file", full_disk)
    with pytest.raises(InsufficientStorageError):
        back_up(store.database, tmp_path / "copy")
    assert not list(tmp_path.glob("copy*"))


def test_a_disk_that_is_full_leaves_the_database_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = kept_then_more(tmp_path)
    monkeypatch.setattr(backup, "sync_file", full_disk)
    with pytest.raises(InsufficientStorageError):
        restore(url, tmp_path / "copy")
    assert texts_in(tmp_path) == ["kept", "more"]


def test_a_restore_that_is_killed_before_the_end_leaves_the_database_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a killed server left it: what came last is in the log alone, which has to go before the database."""

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    url = kept_then_more(tmp_path, killed=True)
    assert (tmp_path / "data" / "memkv.db-wal").stat().st_size > 0
    monkeypatch.setattr(os, "rename", die)
    with pytest.raises(Killed):
        restore(url, tmp_path / "copy")
    monkeypatch.undo()
    assert not (tmp_path / "data" / "memkv.db-wal").exists()
    assert texts_in(tmp_path) == ["kept", "more"]


@pytest.mark.parametrize("state", ["gone", "no database"])
def test_a_lost_database_is_brought_back(tmp_path: Path, state: str) -> None:
    url = kept_then_more(tmp_path)
    database = tmp_path / "data" / "memkv.db"
    database.unlink()
    if state == "no database":
        database.write_bytes(b"nothing of SQLite's" * 1000)
    restore(url, tmp_path / "copy")
    assert texts_in(tmp_path) == ["kept"]


def test_what_is_no_backup_is_refused_and_changes_nothing(
    open_store: OpenStore, tmp_path: Path, database_url: str | None
) -> None:
    store = open_store()
    ingest(store, store.catalog.create_collection(T, new_collection()), "text")
    url = store.database.url
    store.close()
    other = b"PGDMP" if database_url is None else b"SQLite format 3\x00"
    for name, data in (("other", other), ("empty", b""), ("text", b"a text")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match="no backup"):
            restore(url, tmp_path / name)
    with pytest.raises(ConfigError, match="no backup"):
        restore(url, tmp_path / "nothing")
    store = open_store()
    assert found_texts(store, store.catalog.get_collection(T, "papers"), "text") == ["text"]


def test_a_damaged_postgresql_backup_changes_nothing(postgres_url: str, tmp_path: Path) -> None:
    with Store.open(tmp_path / "data", postgres_url) as store:
        row = store.catalog.create_collection(T, new_collection())
        ingest(store, row, "text")
        back_up(store.database, tmp_path / "copy")
        url = store.database.url
    data = (tmp_path / "copy").read_bytes()
    (tmp_path / "copy").write_bytes(data[: len(data) // 2])
    with pytest.raises(DatabaseUnavailable, match="pg_restore failed"):
        restore(url, tmp_path / "copy")
    with Store.open(tmp_path / "data", postgres_url) as store:
        assert found_texts(store, store.catalog.get_collection(T, "papers"), "text") == ["text"]


def test_postgresqls_programs_are_found_beside_the_path_or_asked_for(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shutil.which("pg_dump") or sorted(glob.glob("/usr/lib/postgresql/*/bin/pg_dump"))[-1]
    with Store.open(tmp_path / "data", postgres_url) as store:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        monkeypatch.setattr(glob, "glob", lambda _: [program])
        assert back_up(store.database, tmp_path / "copy") > 0
        monkeypatch.setattr(glob, "glob", lambda _: [])
        with pytest.raises(ConfigError, match="pg_dump is not installed"):
            back_up(store.database, tmp_path / "another")
    assert not list(tmp_path.glob("another*"))


def kept_then_more(tmp_path: Path, *, killed: bool = False) -> URL:
    """A closed SQLite store whose backup lacks its second document. Returns the database's URL."""
    data_dir = tmp_path / "data"
    store = Store.open(data_dir)
    row = store.catalog.create_collection(T, new_collection())
    ingest(store, row, "kept")
    back_up(store.database, tmp_path / "copy")
    ingest(store, row, "more")
    names = ("memkv.db", "memkv.db-wal") if killed else ()
    for name in names:
        shutil.copyfile(data_dir / name, tmp_path / name)
    store.close()
    for name in names:
        shutil.copyfile(tmp_path / name, data_dir / name)
    return store.database.url


def texts_in(tmp_path: Path) -> list[str]:
    with Store.open(tmp_path / "data") as store:
        return sorted(found_texts(store, store.catalog.get_collection(T, "papers"), "kept"))
