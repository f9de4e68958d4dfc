"""Pieces of a store's life that are lived while nobody has it open: backup, restore, downgrade."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from fault_journal import Journal

from memkv.memory import Memory
from memkv.store import Store
from memkv.store.backup import back_up
from memkv.store.database import Database, parse_database_url, sqlite_driver
from memkv.store.schema import downgrade_schema
from memkv.store.snapshots import restore_snapshot

OLDEST = "0001"
_DATABASE_FILES = ("memkv.db", "memkv.db-wal")


def upgrade(data_dir: Path, url: str | None) -> None:
    Store.open(data_dir, url, upgrade=True).close()


def keep_as_killed(memory: Memory) -> None:
    """Remembers the files of an open SQLite database, as a kill at this moment would leave them."""
    for name in _DATABASE_FILES:
        shutil.copyfile(memory._store.data_dir / name, memory._store.data_dir.with_name(f"killed-{name}"))


def leave_as_killed(data_dir: Path) -> None:
    """Puts them back into the closed store."""
    for name in _DATABASE_FILES:
        shutil.copyfile(data_dir.with_name(f"killed-{name}"), data_dir / name)


def check_backup(data_dir: Path) -> list[str]:
    """A backup that has its name is whole, and of the state that the database is still in."""
    copy = data_dir.with_name("backup")
    if not copy.exists():
        return []
    with sqlite_driver.connect(copy) as connection:
        found = [
            f"backup: {row[0]}" for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok"
        ]
        documents = connection.execute("SELECT id, text FROM documents ORDER BY id").fetchall()
    with sqlite_driver.connect(data_dir / "memkv.db") as connection:
        if connection.execute("SELECT id, text FROM documents ORDER BY id").fetchall() != documents:
            found.append("backup: other documents than in the database")
    copy.unlink()
    return found


def check_snapshot(snapshot: Path) -> list[str]:
    """A snapshot that has its name is whole."""
    if not (snapshot / "manifest.json").exists():
        return [f"snapshot: {snapshot.name} has no manifest"]
    said = json.loads((snapshot / "manifest.json").read_text())
    found = {
        "kv_files": len(list(snapshot.glob("blocks/*/*.kv"))),
        "database_bytes": (snapshot / "database").stat().st_size,
    }
    return [
        f"snapshot: {name} is {count}, not {said[name]}"
        for name, count in found.items()
        if count != said[name]
    ]


def _backup(data_dir: Path, url: str | None, _: Journal, __: dict[str, list[int]]) -> None:
    database = Database(parse_database_url(url, data_dir))
    back_up(database, data_dir.with_name("backup"))
    database.close()


def _restore(data_dir: Path, url: str | None, said: Journal, kept: dict[str, list[int]]) -> None:
    [snapshot] = (data_dir / "snapshots").glob("snp_*")
    restore_snapshot(data_dir, url, snapshot.name)
    for name, notes in kept.items():
        said.done(name, notes)


def _downgrade(data_dir: Path, url: str | None, _: Journal, __: dict[str, list[int]]) -> None:
    database = Database(parse_database_url(url, data_dir))
    downgrade_schema(database, OLDEST)
    database.close()


CLOSED: dict[str, Callable[[Path, str | None, Journal, dict[str, list[int]]], None]] = {
    "backup": _backup,
    "restore": _restore,
    "downgrade": _downgrade,
}
