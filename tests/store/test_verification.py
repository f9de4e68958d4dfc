"""A verification of a store that goes on living."""

from __future__ import annotations

import pytest
from store_samples import flip, ingest, path_of, samples_of

from memkv.store import DEFAULT_TENANT, Store
from memkv.store.durable_files import Damage
from memkv.store.rows import CollectionRow, KVFileRow


def test_what_is_let_go_of_while_it_is_looked_at_is_no_problem(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(store, collection, "one line\nanother", external_id="d")
    check, deleted = store.chunks.check, []

    def check_late(row: KVFileRow, *, full: bool) -> Damage | None:
        if not deleted:
            deleted.append(store.delete_document(DEFAULT_TENANT, collection.id, "d"))
        return check(row, full=full)

    monkeypatch.setattr(store.chunks, "check", check_late)
    assert store.verify(full=True) == []
    assert deleted


def test_what_is_damaged_is_one(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "one line\nanother", external_id="d")
    [first, _] = samples_of(store, "one line\nanother")
    flip(path_of(store, first.item), -1)
    assert [problem.kind for problem in store.verify(full=True)] == ["digest"]
