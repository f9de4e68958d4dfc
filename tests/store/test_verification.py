"""A verification of a store that goes on living."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from math import inf
from types import SimpleNamespace

import pytest
from sqlalchemy import update
from store_samples import OpenStore, flip, ingest, path_of, samples_of

from memkv.store import DEFAULT_TENANT, Store, verification
from memkv.store.durable_files import Damage
from memkv.store.rows import CollectionRow, KVFileRow
from memkv.store.tables import KVFile


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


class TestBounded:
    """A verification that has less time than there are files."""

    def looked_at(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The keys of the files that are read from now on, in their order."""
        seen: list[str] = []
        check = store.chunks.check

        def check_and_tell(row: KVFileRow, *, full: bool) -> Damage | None:
            seen.append(row.input_key)
            return check(row, full=full)

        monkeypatch.setattr(store.chunks, "check", check_and_tell)
        return seen

    def keys(self, store: Store) -> list[str]:
        return [row.input_key for row in store.catalog.files_of_all_tenants()]

    def mark(self, store: Store, key: str, moment: datetime | None) -> None:
        with store.database.write() as transaction:
            transaction.connection.execute(
                update(KVFile).where(KVFile.input_key == key).values(verified_at=moment)
            )

    def test_the_next_one_goes_on_where_it_ended(
        self, store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ingest(store, collection, "one\ntwo\nthree\nfour")
        sizes = {row.input_key: row.num_bytes for row in store.catalog.files_of_all_tenants()}
        seen = self.looked_at(store, monkeypatch)
        left = []
        for _ in sizes:
            verified = store.verify_until(-inf, full=True)
            assert (verified.problems, verified.files) == ([], 1)
            assert verified.bytes == sizes[seen[-1]]
            left.append((verified.files_left, verified.bytes_left))
        assert sorted(seen) == sorted(sizes), "one was read twice, another never"
        assert left[0] == (3, sum(sizes.values()) - sizes[seen[0]])
        assert [files for files, _ in left] == [3, 3, 3, 3], "each has all the others before it"
        store.verify_until(-inf, full=True)
        assert seen[-1] == seen[0], "what was read longest ago comes next"
        whole = store.verify_until(inf, full=True)
        assert (whole.files, whole.files_left, whole.bytes_left) == (4, 0, 0)

    def test_it_ends_between_two_files_when_its_time_is_over(
        self, store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ingest(store, collection, "one\ntwo\nthree\nfour")
        clock = iter([10.0, 10.5, 11.0])
        monkeypatch.setattr(verification, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert store.verify_until(11.0, full=True).files == 3

    def test_what_a_clock_that_went_back_marked_comes_first(
        self, store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ingest(store, collection, "one\ntwo\nthree")
        first, second, third = self.keys(store)
        [row] = [row for row in store.catalog.files_of_all_tenants() if row.input_key == third]
        now = store.catalog.find_file(third).created_at
        self.mark(store, first, now - timedelta(days=2))
        self.mark(store, second, now - timedelta(days=1))
        self.mark(store, third, now + timedelta(days=365))
        assert [each.input_key for each in store.catalog.files_by_verification()] == [third, first, second]
        assert store.catalog.files_by_verification()[0] == row

    def test_what_was_read_before_a_kill_is_not_read_again_first(
        self, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store()
        store.chunks.publish([s.item for s in samples_of(store, "one\ntwo\nthree\nfour\nfive")])
        monkeypatch.setattr(verification, "_SCRUB_FILES", 2)
        seen = self.looked_at(store, monkeypatch)

        def die(done: int, total: int) -> None:
            if done == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.verify_until(inf, full=True, on_progress=die)
        read = list(seen)
        seen.clear()
        assert store.verify_until(inf, full=True).files == 5
        assert set(seen[:3]).isdisjoint(read[:2])
        assert set(seen[3:]) == set(read[:2])

    def test_damage_is_told_each_time_until_it_is_mended(
        self, store: Store, collection: CollectionRow
    ) -> None:
        ingest(store, collection, "one\ntwo")
        [first, _] = samples_of(store, "one\ntwo")
        flip(path_of(store, first.item), -1)
        kinds = [[p.kind for p in store.verify_until(-inf, full=True).problems] for _ in range(4)]
        assert kinds[-2:] == [["digest"], ["digest"]]
        assert [p.repaired for p in store.verify_until(-inf, full=True, repair=True).problems] == [True]
        assert store.verify(full=True) == []

    def test_database_and_indexes_are_looked_at_in_any_case(
        self, store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ingest(store, collection, "one\ntwo")
        monkeypatch.setattr(store.database, "find_damage", lambda: ["a torn page"])
        monkeypatch.setattr(store.indexes, "check", lambda row: Damage("digest", "not what was written"))
        found = store.verify_until(time.monotonic(), full=True)
        assert [problem.kind for problem in found.problems] == ["database", "index"]
