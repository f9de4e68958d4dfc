"""A real full disk: a small tmpfs in many sizes, so that it strikes at every write. Needs leave to mount."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from small_disk import fill, resize, small_disk, used
from store_samples import DIM, commit, found_texts, load, new_collection, samples_of

from memkv.errors import InsufficientStorageError
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.database import sqlite_driver
from memkv.store.rows import NewDocument, PageRequest
from memkv.store.space_reserve import SpaceReserve

__all__ = ["small_disk"]

T = DEFAULT_TENANT
TEXT = "\n".join(f"line {number} " + "of some length " * 8 for number in range(6))


def test_a_full_disk_is_507_loses_nothing_and_ingest_goes_on_when_there_is_room(small_disk: Path) -> None:
    with Store.open(small_disk / "data") as store:
        collection = store.catalog.create_collection(T, new_collection(dim=DIM))
        refused: dict[str, int] = {}
        for step in range(24):
            text = f"{TEXT}\nround {step}"
            resize(small_disk, used(small_disk) + step * 8192)
            stage, document = "accept", None
            try:
                document = store.accept_documents(T, collection.id, [NewDocument(text)]).documents[0].document
                stage = "publish"
                store.chunks.publish([sample.item for sample in samples_of(store, text)])
                stage = "commit"
                commit(store, document, text, publish=False)
                stage = "done"
            except InsufficientStorageError:
                pass  # counted below by the stage it struck
            refused[stage] = refused.get(stage, 0) + 1
            assert [problem for problem in store.verify(full=True) if problem.kind != "orphan"] == []
            assert list((store.data_dir / "tmp").iterdir()) == []
            if document is not None:
                assert store.catalog.document_text(T, document.id)[1] == text
            assert isinstance(found_texts(store, collection, text), list), "reading stopped"
            resize(small_disk, 64 << 20)
            again = store.accept_documents(T, collection.id, [NewDocument(text)]).documents[0].document
            assert document is None or again.id == document.id
            if again.status == "pending":
                assert commit(store, again, text).outcome == "ready"
            assert all(load(store, sample.item) is not None for sample in samples_of(store, text))
            store.delete_document(T, collection.id, again.id)
        assert {"accept", "publish", "done"} <= set(refused), refused
    with Store.open(small_disk / "data") as store:
        assert store.verify(full=True) == []


def test_a_store_closes_and_opens_on_a_full_disk(small_disk: Path) -> None:
    with Store.open(small_disk / "data") as store:
        collection = store.catalog.create_collection(T, new_collection())
        document = store.accept_documents(T, collection.id, [NewDocument(TEXT)]).documents[0].document
        commit(store, document, TEXT)
        found_texts(store, collection, "x")
        resize(small_disk, used(small_disk))
    for _ in range(3):
        fill(small_disk, "filler")
        with Store.open(small_disk / "data") as store:
            assert len(found_texts(store, collection, "x")) == 6
    resize(small_disk, 64 << 20)
    with Store.open(small_disk / "data") as store:
        assert len(found_texts(store, collection, "x")) == 6


def delete_on_a_full_disk(disk: Path) -> None:
    with Store.open(disk / "data") as store:
        collection = store.catalog.create_collection(T, new_collection())
        documents = []
        for number in range(3):
            text = f"{TEXT}\n{number}"
            document = store.accept_documents(T, collection.id, [NewDocument(text)]).documents[0].document
            commit(store, document, text)
            documents.append(document)
        with closing(sqlite_driver.connect(store.data_dir / "memkv.db")) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # no room is left in the log
        fill(disk, "filler")
        with pytest.raises(InsufficientStorageError):
            store.accept_documents(T, collection.id, [NewDocument("x" * 100_000)])
        for document in documents:
            store.delete_document(T, collection.id, document.id)
        assert found_texts(store, collection, "x") == []
        assert store.verify(full=True) == []
        assert store.catalog.kv_totals() == (0, 0)


def test_deleting_works_on_a_full_disk_and_makes_room(small_disk: Path) -> None:
    delete_on_a_full_disk(small_disk)


def make_room_on_a_full_disk(disk: Path) -> None:
    """Collects garbage and evicts, as an operator would whose disk is full."""
    with Store.open(disk / "data") as store:
        collection = store.catalog.create_collection(T, new_collection())
        document = store.accept_documents(T, collection.id, [NewDocument(TEXT)]).documents[0].document
        commit(store, document, TEXT)
        for job in store.jobs.list(T, PageRequest()).rows:
            store.jobs.finish(job.id, "succeeded")
        store.chunks.publish([sample.item for sample in samples_of(store, "garbage\nmore of it")])
        with closing(sqlite_driver.connect(store.data_dir / "memkv.db")) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # no room is left in the log
        fill(disk, "filler")
        with pytest.raises(InsufficientStorageError):
            store.accept_documents(T, collection.id, [NewDocument("x" * 100_000)])
        assert store.upkeep.collect_garbage().files == 2
        fill(disk, "more filler")
        evicted = store.upkeep.evict(to_bytes=0)
        assert (evicted.files, evicted.failed) == (6, 0)
        assert store.verify(full=True) == []
        assert store.catalog.kv_totals() == (0, 0)


def test_garbage_and_kv_go_on_a_full_disk(small_disk: Path) -> None:
    make_room_on_a_full_disk(small_disk)


def test_without_the_reserve_they_would_not(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpaceReserve, "fill", lambda *_, **__: None)
    with pytest.raises(InsufficientStorageError):
        make_room_on_a_full_disk(small_disk)


def test_without_the_reserve_it_would_not(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpaceReserve, "fill", lambda *_, **__: None)
    with pytest.raises(InsufficientStorageError):
        delete_on_a_full_disk(small_disk)
