"""A snapshot that is restored brings no revoked access key back, and takes none away."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_samples import OpenStore

from memkv.errors import ConfigError
from memkv.store import Store, restored_keys, snapshots
from memkv.store.database import Database, parse_database_url
from memkv.store.rows import AccessKeyRow, NewAccessKey
from memkv.store.schema import downgrade_schema
from memkv.store.snapshots import restore_snapshot

pytestmark = pytest.mark.usefixtures("client_programs")

ADMIN = NewAccessKey("ops", "admin", None, None)
WIKI = NewAccessKey("wiki", "write", ("wiki",), None)


def made(store: Store, new: NewAccessKey, digest: str) -> AccessKeyRow:
    return store.catalog.create_key(new, f"mkv_{digest}", digest * 16)


def two_states(store: Store) -> tuple[str, list[AccessKeyRow]]:
    """A snapshot, and the keys as they were changed since."""
    admin, wiki = made(store, ADMIN, "aaaa"), made(store, WIKI, "bbbb")
    snapshot = store.snapshots.create().id
    changed = [
        admin,
        store.catalog.revoke_key(wiki.id),
        made(store, WIKI, "cccc"),
    ]
    return snapshot, changed


def keys_of(store: Store) -> list[AccessKeyRow | None]:
    return [store.catalog.key_of(digest * 16) for digest in ("aaaa", "bbbb", "cccc")]


def test_keys_stay_as_they_are(open_store: OpenStore, data_dir: Path, database_url: str | None) -> None:
    store = open_store()
    snapshot, changed = two_states(store)
    store.close()
    restore_snapshot(data_dir, database_url, snapshot)
    restore_snapshot(data_dir, database_url, snapshot)  # once more before anybody opens it
    store = open_store()
    assert keys_of(store) == changed
    assert not restored_keys.kept_keys_path(data_dir).exists()


def test_they_are_asked_for_although_the_snapshot_knows_none(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store()
    snapshot = store.snapshots.create().id
    key = made(store, ADMIN, "aaaa")
    store.close()
    restore_snapshot(data_dir, database_url, snapshot)
    store = open_store()
    assert keys_of(store) == [key, None, None]
    store.close()


def test_a_kill_before_the_opening_or_before_the_end_loses_none(
    open_store: OpenStore, data_dir: Path, database_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    store = open_store()
    snapshot, changed = two_states(store)
    store.close()
    with monkeypatch.context() as killing:
        killing.setattr(snapshots, "restore", kill)
        with pytest.raises(Killed):
            restore_snapshot(data_dir, database_url, snapshot)
    restore_snapshot(data_dir, database_url, snapshot)
    with monkeypatch.context() as killing:
        killing.setattr(Path, "unlink", kill)
        with pytest.raises(Killed):
            open_store()
    assert keys_of(open_store()) == changed


def test_what_cannot_be_read_is_told(open_store: OpenStore, data_dir: Path, database_url: str | None) -> None:
    store = open_store()
    snapshot, _ = two_states(store)
    store.close()
    restore_snapshot(data_dir, database_url, snapshot)
    kept = restored_keys.kept_keys_path(data_dir)
    good = kept.read_bytes()
    kept.write_bytes(good[:-5])
    with pytest.raises(ConfigError) as caught:
        open_store()
    assert "remove it" in caught.value.hint
    kept.unlink()
    kept.mkdir()
    with pytest.raises(ConfigError):
        open_store()
    kept.rmdir()
    assert keys_of(open_store())[2] is None


def test_an_older_or_unreadable_database_has_no_keys_to_keep(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store()
    snapshot, _ = two_states(store)
    store.close()
    url = parse_database_url(database_url, data_dir)
    database = Database(url)
    downgrade_schema(database, "0005")
    database.close()
    restore_snapshot(data_dir, database_url, snapshot)
    assert not restored_keys.kept_keys_path(data_dir).exists()
    assert keys_of(open_store())[2] is None


def test_a_damaged_database_is_replaced(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        snapshot, _ = two_states(store)
    (tmp_path / "memkv.db").write_bytes(b"SQLite format 3\0" + b"\1" * 5000)
    restore_snapshot(tmp_path, None, snapshot)
    with Store.open(tmp_path) as store:
        admin, wiki, _ = keys_of(store)
        assert admin is not None
        assert wiki is not None
        assert wiki.revoked_at is None
