"""Opening: one process at a time, the right pair of directory and database, and what a start repairs."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from store_samples import OpenStore, found_texts, ingest, load, new_collection, samples_of

from memkv.errors import ConfigError, DatabaseUnavailable, MigrationNeeded, StoreLocked
from memkv.store import DEFAULT_TENANT, Store

T = DEFAULT_TENANT

HOLD = """
    import sys, time
    from pathlib import Path
    from memkv.store import Store
    from memkv.errors import StoreLocked
    try:
        store = Store.open(Path(sys.argv[1]), sys.argv[2] or None)
    except StoreLocked:
        print("locked", flush=True)
    else:
        print("open", flush=True)
        time.sleep(60)
"""


def start_holder(data_dir: Path, url: str | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(HOLD), str(data_dir), url or ""],
        stdout=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_second_process_is_told_who_holds_the_store_and_a_killed_one_leaves_nothing(
    data_dir: Path, database_url: str | None
) -> None:
    holder = start_holder(data_dir, database_url)
    try:
        assert first_line(holder) == "open"
        with pytest.raises(StoreLocked, match=f"process {holder.pid}") as caught:
            Store.open(data_dir, database_url)
        assert "MEMKV_DATA_DIR" in caught.value.hint
    finally:
        end(holder)
    began = time.monotonic()
    Store.open(data_dir, database_url).close()
    assert time.monotonic() - began < 5


def test_of_processes_started_together_one_opens(data_dir: Path) -> None:
    holders = [start_holder(data_dir, None) for _ in range(3)]
    try:
        assert sorted(first_line(holder) for holder in holders) == ["locked", "locked", "open"]
    finally:
        for holder in holders:
            end(holder)


def test_two_opens_in_one_process(open_store: OpenStore, data_dir: Path, database_url: str | None) -> None:
    store = open_store()
    for _ in range(3):
        with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
            Store.open(data_dir, database_url)
    store.close()
    store.close()
    with pytest.raises(DatabaseUnavailable, match="closed"):
        store.catalog.generation()
    open_store()


def test_two_directories_cannot_share_a_postgresql_database(tmp_path: Path, postgres_url: str) -> None:
    with (
        Store.open(tmp_path / "a", postgres_url),
        pytest.raises(StoreLocked, match=f"process {os.getpid()}"),
    ):
        Store.open(tmp_path / "b", postgres_url, busy_seconds=0.2)
    with pytest.raises(ConfigError, match="another database"):  # b was locked out before it got a STORE
        Store.open(tmp_path / "a", None)
    Store.open(tmp_path / "b", postgres_url).close()


def test_a_directory_is_opened_only_with_its_own_database(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    Store.open(first).close()
    Store.open(second).close()
    with pytest.raises(ConfigError, match="another database") as caught:
        Store.open(first, f"sqlite:///{second}/memkv.db")
    assert "MEMKV_DATABASE_URL" in caught.value.hint
    with pytest.raises(ConfigError, match="another database"):
        Store.open(first, f"sqlite:///{tmp_path}/fresh.db", upgrade=True)
    with sqlite3.connect(tmp_path / "fresh.db") as fresh:
        assert fresh.execute("SELECT count(*) FROM sqlite_master").fetchone() == (
            0,
        )  # nothing was made in it
    Store.open(first).close()


@pytest.mark.parametrize(
    "content", [None, b"", b"garbage", b"[]", b'{"store_id": 5, "format_version": 1}', b"\xff"]
)
def test_a_lost_or_damaged_store_file_is_written_again(tmp_path: Path, content: bytes | None) -> None:
    with Store.open(tmp_path / "data") as store:
        store_id = store.store_id
    path = tmp_path / "data" / "STORE"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with Store.open(tmp_path / "data") as store:
        assert store.store_id == store_id
    assert store_id in path.read_text()


def test_a_directory_of_a_later_format_is_left_alone(tmp_path: Path) -> None:
    Store.open(tmp_path / "data").close()
    path = tmp_path / "data" / "STORE"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(MigrationNeeded, match="format 2"):
        Store.open(tmp_path / "data")


def test_directories_that_cannot_be_used_are_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError) as caught:
        Store.open(tmp_path / "file")
    assert caught.value.hint
    with pytest.raises(ConfigError):
        Store.open(tmp_path / "file" / "below")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "blocks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="link"):
        Store.open(tmp_path / "linked")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "lock").symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError):
        Store.open(tmp_path / "locked")
    assert (tmp_path / "file").read_text() == "x"


def test_a_failed_opening_lets_go_of_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("memkv.store.store._pair", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Store.open(tmp_path / "data")
    Store.open(tmp_path / "data").close()


def test_a_start_clears_drafts_drops_rows_without_file_and_minds_nothing_else(open_store: OpenStore) -> None:
    store = open_store()
    collection = store.catalog.create_collection(T, new_collection())
    ingest(store, collection, "kept\ngone\nswapped")
    kept, gone, swapped = samples_of(store, "kept\ngone\nswapped")
    blocks = store.data_dir / "blocks"

    def path(key: str) -> Path:
        return next(iter((blocks / key[:2]).glob(f"{key}.*")))

    path(gone.item.input_key).unlink()
    target = path(swapped.item.input_key)
    target.rename(target.with_name(f"{swapped.item.input_key}.{'0' * 32}.kv"))
    store.close()
    for name in ("tmp/left", "tmp/over", "blocks/README", "blocks/zz", "indexes/x", "quarantine/y", "notes"):
        (store.data_dir / name).write_text("unknown")
    (store.data_dir / "blocks" / "qq").mkdir()
    (store.data_dir / "blocks" / "qq" / "core").write_text("unknown")
    (store.data_dir / "tmp" / "directory").mkdir()
    epoch = store.recovery.epoch
    store = open_store()
    assert store.recovery.epoch == epoch + 1
    assert (store.recovery.drafts_removed, store.recovery.rows_dropped, store.recovery.orphans) == (2, 2, 1)
    assert (store.data_dir / "notes").exists()
    assert load(store, kept.item) is not None
    assert load(store, gone.item) is None
    assert sorted(found_texts(store, collection, "x")) == ["gone", "kept", "swapped"]
    assert [problem.kind for problem in store.verify(full=True)] == ["orphan"]
    store.close()
    store = open_store()
    assert (store.recovery.drafts_removed, store.recovery.rows_dropped) == (0, 0)


def test_rows_of_a_directory_that_cannot_be_listed_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(tmp_path / "data") as store:
        collection = store.catalog.create_collection(T, new_collection())
        ingest(store, collection, "text")
        [sample] = samples_of(store, "text")
    real = os.scandir

    def failing(path: object) -> object:
        if str(path).endswith(f"blocks/{sample.item.input_key[:2]}"):
            raise OSError(5, "I/O error")
        return real(path)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing)
        Store.open(tmp_path / "data").close()
    with Store.open(tmp_path / "data") as store:
        assert load(store, sample.item) is not None


def test_a_start_stays_quick_with_many_files(tmp_path: Path) -> None:
    with Store.open(tmp_path / "data") as store:
        samples = samples_of(store, "\n".join(f"chunk {number}" for number in range(300)))
        store.chunks.publish([sample.item for sample in samples])
    began = time.monotonic()
    with Store.open(tmp_path / "data") as store:
        assert store.recovery.rows_dropped == 0
    assert time.monotonic() - began < 5


def test_what_the_store_imports(tmp_path: Path) -> None:
    script = """
        import sys
        import memkv.store
        heavy = {"torch", "transformers", "litestar", "psycopg"} & set(sys.modules)
        sys.exit(f"memkv.store imports {heavy}" if heavy else 0)
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_only_the_catalogs_side_speaks_sql() -> None:
    import memkv.store

    folder = Path(memkv.store.__file__).parent
    speaking = {
        path.name
        for path in folder.glob("*.py")
        if "import sqlalchemy" in path.read_text() or "from sqlalchemy" in path.read_text()
    }
    expected = {path.name for path in folder.glob("catalog_*.py")}
    expected |= {"tables.py", "database.py", "schema.py", "jobs.py", "paging.py", "lock.py", "backup.py"}
    assert speaking == expected
