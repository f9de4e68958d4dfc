"""Snapshots and backups: the store comes back as it was, on both databases."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from store_samples import OpenStore, found_texts, ingest, is_exact, new_collection, path_of, samples_of

from memkv.errors import ConfigError, InsufficientStorageError, NotFoundError, StoreLocked
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.backup import back_up, restore
from memkv.store.database import parse_database_url
from memkv.store.snapshots import restore_snapshot

T = DEFAULT_TENANT


pytestmark = pytest.mark.usefixtures("client_programs")


def test_a_store_comes_back_as_it_was(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store()
    row = store.catalog.create_collection(T, new_collection())
    ingest(store, row, "before\nboth", external_id="a")
    plan = store.snapshots.plan()
    made = store.snapshots.create()
    assert (made.kv_files, made.generation) == (2, store.catalog.generation())
    assert (plan.id, plan.kv_files, plan.kv_bytes) == ("", made.kv_files, made.kv_bytes)
    assert store.snapshots.list() == [made]
    store.delete_document(T, row.id, "a")
    ingest(store, row, "after\nboth", external_id="b")
    assert sorted(found_texts(store, row, "x")) == ["after", "both"]
    with pytest.raises(StoreLocked):
        restore_snapshot(data_dir, database_url, made.id)
    store.close()

    assert restore_snapshot(data_dir, database_url, made.id, dry_run=True) == made
    with open_store() as store:
        row = store.catalog.get_collection(T, "papers")
        assert sorted(found_texts(store, row, "x")) == ["after", "both"]
    assert restore_snapshot(data_dir, database_url, made.id) == made
    store = open_store()
    row = store.catalog.get_collection(T, "papers")
    assert sorted(found_texts(store, row, "x")) == ["before", "both"]
    assert all(is_exact(store, sample) for sample in samples_of(store, "before\nboth"))
    kinds = {problem.kind for problem in store.verify(full=True)}
    assert kinds <= {"orphan"}, "only files that came after it are left over"
    store.upkeep.collect_garbage()
    assert store.verify(full=True) == []
    ingest(store, row, "onwards", external_id="c")
    assert "onwards" in found_texts(store, row, "x")

    store.snapshots.delete(made.id)
    assert store.snapshots.list() == []
    assert list((data_dir / "snapshots").iterdir()) == []
    assert store.verify(full=True) == [], "deleting a snapshot took block files away"


def test_block_files_are_shared_and_outlive_an_eviction(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store()
    row = store.catalog.create_collection(T, new_collection())
    ingest(store, row, "text", external_id="a")
    [sample] = samples_of(store, "text")
    made = store.snapshots.create()
    assert path_of(store, sample.item).stat().st_nlink == 2
    store.upkeep.evict()
    assert not is_exact(store, sample)
    store.close()
    restore_snapshot(data_dir, database_url, made.id)
    assert is_exact(open_store(), sample)


def test_what_is_no_snapshot_of_this_store_is_refused(
    open_store: OpenStore, data_dir: Path, database_url: str | None, tmp_path: Path
) -> None:
    store = open_store()
    made = store.snapshots.create()
    for name in ("", "..", "snp_", made.id.upper(), f"../snapshots/{made.id}"):
        with pytest.raises(NotFoundError):
            store.snapshots.delete(name)
    store.close()
    with pytest.raises(NotFoundError):
        restore_snapshot(data_dir, database_url, "snp_" + "0" * 32)
    with Store.open(tmp_path / "other") as other:
        other_id = other.snapshots.create().id
    shutil.copytree(tmp_path / "other" / "snapshots" / other_id, data_dir / "snapshots" / other_id)
    with pytest.raises(ConfigError, match="another store"):
        restore_snapshot(data_dir, database_url, other_id)
    (data_dir / "snapshots" / made.id / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="damaged"):
        restore_snapshot(data_dir, database_url, made.id)
    assert open_store().catalog.store_id() == made.store_id


def test_a_snapshot_of_another_kind_of_database_is_refused(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store()
    made = store.snapshots.create()
    store.close()
    manifest = data_dir / "snapshots" / made.id / "manifest.json"
    manifest.write_text(manifest.read_text().replace(made.dialect, "oracle"))
    with pytest.raises(ConfigError, match="of kind oracle"):
        restore_snapshot(data_dir, database_url, made.id)


def test_a_directory_that_does_not_say_whose_it_is_takes_no_snapshot(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store()
    made = store.snapshots.create()
    store.close()
    for content in (None, "nothing of JSON"):
        (data_dir / "STORE").unlink()
        if content is not None:
            (data_dir / "STORE").write_text(content)
        with pytest.raises(ConfigError, match="another store"):
            restore_snapshot(data_dir, database_url, made.id)
        (data_dir / "STORE").touch()


def test_only_whole_snapshots_are_listed(store: Store, data_dir: Path) -> None:
    made = [store.snapshots.create() for _ in range(3)]
    root = data_dir / "snapshots"
    (root / "notes.txt").write_text("an operator's own")
    (root / made[0].id / "manifest.json").unlink()
    (root / made[1].id / "manifest.json").write_text('{"id": 7}')
    assert store.snapshots.list() == [made[2]]


def test_a_restore_that_finds_no_room_for_links_changes_nothing(
    open_store: OpenStore, data_dir: Path, database_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    row = store.catalog.create_collection(T, new_collection())
    ingest(store, row, "text", external_id="a")
    made = store.snapshots.create()
    ingest(store, row, "later", external_id="b")
    store.close()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.link", full)
        with pytest.raises(InsufficientStorageError):
            restore_snapshot(data_dir, database_url, made.id)
    assert sorted(found_texts(open_store(), row, "x")) == ["later", "text"]


def test_a_snapshot_that_fails_leaves_none(
    open_store: OpenStore, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    row = store.catalog.create_collection(T, new_collection())
    ingest(store, row, "text", external_id="a")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.link", full)
        with pytest.raises(InsufficientStorageError):
            store.snapshots.create()
    assert store.snapshots.list() == []
    assert list((data_dir / "snapshots").iterdir()) == []


def test_a_backup_is_restored(
    open_store: OpenStore, data_dir: Path, database_url: str | None, tmp_path: Path
) -> None:
    store = open_store()
    row = store.catalog.create_collection(T, new_collection())
    ingest(store, row, "kept", external_id="a")
    kept = tmp_path / "backup"
    assert back_up(store.database, kept) == kept.stat().st_size > 0
    assert kept.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="exists"):
        back_up(store.database, kept)
    with pytest.raises(ConfigError):
        back_up(store.database, tmp_path / "no" / "backup")
    store.delete_document(T, row.id, "a")
    store.close()
    url = parse_database_url(database_url, data_dir)
    restore(url, kept)
    store = open_store()
    assert found_texts(store, store.catalog.get_collection(T, "papers"), "kept") == ["kept"]
    store.close()
    (tmp_path / "noise").write_bytes(b"noise" * 100)
    for name in ("noise", "nothing"):
        with pytest.raises(ConfigError):
            restore(url, tmp_path / name)
    assert open_store().catalog.store_id() is not None
    assert not list(tmp_path.glob("*.part"))
