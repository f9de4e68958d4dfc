"""Vector indexes whose collection changes, or goes, while they are opened or followed."""

from __future__ import annotations

import pytest
from store_samples import found_texts, ingest, vector_of

from memkv.store import DEFAULT_TENANT, Store
from memkv.store.rows import Change, CollectionRow

T = DEFAULT_TENANT


def test_a_collection_that_goes_while_its_index_is_opened_is_an_empty_one(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there when its state is asked for, and gone when its vectors are."""
    ingest(store, collection, "text")
    store.indexes.drop(collection.id)
    vectors, deleted = store.catalog.vectors, []

    def delete_first(tenant: str, collection_id: str) -> object:
        if not deleted:
            deleted.append(store.delete_collection(T, collection.name))
        return vectors(tenant, collection_id)

    monkeypatch.setattr(store.catalog, "vectors", delete_first)
    index = store.indexes.get(collection)
    assert deleted
    assert len(index) == 0
    assert len(index.search(vector_of("text"), 3).row_ids) == 0


def test_a_commit_whose_predecessor_never_arrived_makes_the_index_anew(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the thread that was to follow it died."""
    ingest(store, collection, "first")
    assert found_texts(store, collection, "first") == ["first"]
    apply = store.indexes.apply
    monkeypatch.setattr(store.indexes, "apply", lambda *_: None)
    ingest(store, collection, "second")
    monkeypatch.setattr(store.indexes, "apply", apply)
    before = store.indexes.stats()["rebuilt"]
    ingest(store, collection, "third")
    assert store.indexes.stats()["rebuilt"] == before + 1
    assert sorted(found_texts(store, collection, "first")) == ["first", "second", "third"]


def test_a_commit_to_a_collection_that_is_gone_changes_nothing(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(store, collection, "text")
    index = store.indexes.get(collection)
    newest = store.catalog.get_collection(T, collection.name)
    monkeypatch.setattr(store.indexes, "drop", lambda _: None)  # it is about to be
    deleted = store.delete_collection(T, collection.name)
    removed = index.content().row_ids
    late = Change.removal(collection.id, newest.generation + 5, newest.stamp, removed, deleted.released)
    store.indexes.apply(T, late)
    assert len(index) == 1
