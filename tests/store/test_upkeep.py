"""What an operator does to a store: only what nothing needs goes, and it is told how much that was."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update
from store_samples import (
    OpenStore,
    damages,
    flip,
    found_texts,
    ingest,
    is_exact,
    load,
    new_collection,
    path_of,
    quarantined,
    samples_of,
    tokens_of,
)

from memkv.config import StoreConfig
from memkv.errors import BadRequestError, ConflictError, NotFoundError
from memkv.kv.fingerprint import input_key
from memkv.memory.metrics import store_metrics
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.archives import Archives
from memkv.store.rows import CollectionRow, NewDocument, PageRequest
from memkv.store.tables import KVFile
from memkv.store.verification import Scrubbed, scrub

T = DEFAULT_TENANT


def publish_unused(store: Store, text: str) -> None:
    """As a job that was given up leaves it: files and no chunk."""
    store.chunks.publish([sample.item for sample in samples_of(store, text)])


def forget_rows(store: Store, text: str) -> None:
    """As a kill between the names and the rows leaves it: files and no row."""
    publish_unused(store, text)
    for sample in samples_of(store, text):
        row = store.catalog.file_for(T, sample.item.input_key)
        assert row is not None
        store.catalog.drop_file(T, row.input_key, row.file_digest)


def files_in(store: Store) -> int:
    return len(list((store.data_dir / "blocks").glob("*/*.kv")))


def test_garbage_goes_and_nothing_else(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "kept\nalso kept", external_id="a")
    publish_unused(store, "left by a job")
    forget_rows(store, "left by a kill")
    stray = store.data_dir / "indexes" / f"col_{'0' * 32}.vectors"
    stray.write_bytes(bytes(100))
    kinds = {problem.kind for problem in store.verify(full=True)}
    assert kinds == {"unused", "orphan"}

    plan = store.upkeep.collect_garbage(dry_run=True)
    assert (plan.files, files_in(store), stray.exists()) == (3, 4, True)
    done = store.upkeep.collect_garbage()
    assert (done.files, done.bytes, done.bytes_after) == (3, plan.bytes, plan.bytes_after)
    assert done.failed == 0
    assert not stray.exists()
    [unused] = samples_of(store, "left by a job")
    assert done.released == (unused.item.input_key,)
    assert all(is_exact(store, sample) for sample in samples_of(store, "kept\nalso kept"))
    assert store.verify(full=True) == []
    again = store.upkeep.collect_garbage()
    assert (again.files, again.bytes_before) == (0, done.bytes_after)


def test_what_a_live_job_published_is_no_garbage(store: Store, collection: CollectionRow) -> None:
    """A job publishes before it commits: gc and verify in between take nothing away from it."""
    accepted = store.accept_documents(T, collection.id, [NewDocument("under way", external_id="a")])
    publish_unused(store, "under way")
    assert store.verify(full=True, repair=True) == []
    assert store.upkeep.collect_garbage().files == 0
    [sample] = samples_of(store, "under way")
    assert is_exact(store, sample)
    assert accepted.job is not None
    store.jobs.claim("worker")
    store.jobs.finish(accepted.job.id, "failed")
    assert store.upkeep.collect_garbage().files == 1
    assert load(store, sample.item) is None


def test_most_of_a_store_goes_only_by_force(plain_store: Store) -> None:
    """The wrong database, or yesterday's, makes nearly every file look like garbage."""
    store = plain_store
    forget_rows(store, "\n".join(f"line {number}" for number in range(30)))
    with pytest.raises(ConflictError, match="30 of 30") as caught:
        store.upkeep.collect_garbage()
    assert "--force" in caught.value.hint
    assert files_in(store) == 30
    assert store.upkeep.collect_garbage(dry_run=True).files == 30
    assert store.upkeep.collect_garbage(force=True).files == 30
    assert files_in(store) == 0


def test_a_file_that_cannot_be_removed_is_counted(plain_store: Store) -> None:
    forget_rows(plain_store, "stuck")
    [path] = (plain_store.data_dir / "blocks").glob("*/*.kv")
    path.unlink()
    path.mkdir()
    done = plain_store.upkeep.collect_garbage()
    assert (done.files, done.failed) == (0, 1)


def test_what_a_repair_would_remove_is_told(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "needed")
    assert store.upkeep.unneeded_bytes() == 0
    publish_unused(store, "unused")
    forget_rows(store, "orphan")
    wanted = [sample.item for text in ("unused", "orphan") for sample in samples_of(store, text)]
    assert store.upkeep.unneeded_bytes() == sum(path_of(store, item).stat().st_size for item in wanted)
    before = store.upkeep.disk_bytes()
    told = store.upkeep.unneeded_bytes()
    store.verify(repair=True)
    assert store.upkeep.disk_bytes() == before - told


class TestEviction:
    def test_what_was_used_longest_ago_goes_first(self, store: Store, collection: CollectionRow) -> None:
        texts = ["one", "two", "three"]
        ingest(store, collection, "\n".join(texts), external_id="a")
        samples = dict(zip(texts, samples_of(store, "\n".join(texts)), strict=True))
        for name in ("two", "one"):  # `three` is the oldest: it was never used
            store.uses.note(T, [samples[name].item.input_key])
            store.uses.flush()
            time.sleep(0.002)
        size = path_of(store, samples["one"].item).stat().st_size
        plan = store.upkeep.evict(to_bytes=2 * size, dry_run=True)
        assert (plan.files, files_in(store)) == (1, 3)
        assert store.upkeep.evict(to_bytes=2 * size).files == 1
        assert [name for name in texts if is_exact(store, samples[name])] == ["one", "two"]
        assert store.upkeep.evict(to_bytes=size).released == (samples["two"].item.input_key,)
        assert store.upkeep.evict(to_bytes=size).files == 0
        assert store.upkeep.evict().files == 1
        assert files_in(store) == 0
        assert set(found_texts(store, collection, "one")) == set(texts), "texts and vectors stay"
        assert store.verify(full=True) == []
        store.chunks.publish([samples["one"].item])
        assert is_exact(store, samples["one"])

    def test_one_collection_keeps_the_others(self, store: Store, collection: CollectionRow) -> None:
        other = store.catalog.create_collection(T, new_collection("letters"))
        for row, text in ((collection, "of the first"), (other, "of the second")):
            [sample] = samples_of(store, text)
            store.chunks.publish([replace(sample.item, collection_id=row.id)])
            ingest(store, row, text, publish=False)
        done = store.upkeep.evict(other)
        assert done.files == 1
        assert is_exact(store, samples_of(store, "of the first")[0])
        assert not is_exact(store, samples_of(store, "of the second")[0])
        assert store.catalog.kv_bytes(collection_id=other.id) == 0
        assert store.catalog.kv_bytes(collection_id=collection.id) == store.catalog.kv_bytes(tenant=T) > 0

    def test_a_file_that_cannot_be_removed_is_counted(self, store: Store, collection: CollectionRow) -> None:
        ingest(store, collection, "stuck\nloose")
        stuck = path_of(store, samples_of(store, "stuck\nloose")[0].item)
        stuck.unlink()
        stuck.mkdir()
        done = store.upkeep.evict()
        assert (done.files, done.failed) == (1, 1)
        assert len(done.released) == 2, "no row names it any more"

    def test_a_prefix_stays(self, plain_store: Store) -> None:
        store = plain_store
        row = store.catalog.create_collection(T, new_collection())
        [sample] = samples_of(store, "x")
        store.chunks.publish([replace(sample.item, input_key=row.prefix_key)])
        assert store.upkeep.evict().files == 0
        assert store.upkeep.collect_garbage().files == 0


class TestListing:
    def test_files_are_told_with_what_refers_to_them(self, store: Store, collection: CollectionRow) -> None:
        ingest(store, collection, "shared\nalone", external_id="a")
        ingest(store, collection, "shared", external_id="b")
        publish_unused(store, "nobody's")
        shared, alone = samples_of(store, "shared\nalone")
        store.uses.note(T, [alone.item.input_key] * 2)
        store.uses.flush()
        found = {state.file.input_key: state for state in store.catalog.list_files(PageRequest()).rows}
        assert len(found) == 3
        assert (found[shared.item.input_key].chunks, found[shared.item.input_key].uses) == (2, 0)
        assert (found[alone.item.input_key].chunks, found[alone.item.input_key].uses) == (1, 2)
        assert found[alone.item.input_key].used_at is not None
        [unused] = store.catalog.list_files(PageRequest(), unused=True).rows
        assert unused.file.input_key == samples_of(store, "nobody's")[0].item.input_key
        references = store.catalog.references(T, shared.item.input_key)
        assert [(r.collection, r.external_id, r.ordinal) for r in references] == [
            ("papers", "a", 0),
            ("papers", "b", 0),
        ]
        first = store.catalog.list_files(PageRequest(limit=2))
        rest = store.catalog.list_files(PageRequest(after=first.rows[-1].file.input_key))
        assert first.has_more
        assert [*first.rows, *rest.rows] == sorted(found.values(), key=lambda state: state.file.input_key)

    def test_a_file_is_found_by_the_first_digits_of_its_key(self, store: Store) -> None:
        publish_unused(store, "text")
        [sample] = samples_of(store, "text")
        key = sample.item.input_key
        for given in (key, key[:8], key[:63]):
            assert store.catalog.find_file(given).file.input_key == key
        with pytest.raises(NotFoundError):
            store.catalog.find_file("0" * 63 + ("1" if key[-1] == "0" else "0"))
        for given in (key[:7], "no key at all", "%" * 8, key.upper()[:10] + "G"):
            with pytest.raises(BadRequestError):
                store.catalog.find_file(given)


class TestQuarantine:
    def test_what_was_set_aside_is_told_and_can_go(self, plain_store: Store) -> None:
        store = plain_store
        [sample] = samples_of(store, "hurt")
        store.chunks.publish([sample.item])
        size = path_of(store, sample.item).stat().st_size
        flip(path_of(store, sample.item), 5000)
        assert load(store, sample.item) is None
        [found] = store.upkeep.quarantined()
        assert (found.kind, found.bytes) == ("digest", size)
        assert found.detail == "damaged blocks: 0"
        assert found.time
        plan = store.upkeep.purge_quarantine(dry_run=True)
        assert (plan.files, plan.bytes, len(quarantined(store))) == (1, size, 1)
        done = store.upkeep.purge_quarantine()
        assert (done.files, done.failed) == (1, 0)
        assert done.bytes >= size
        assert list((store.data_dir / "quarantine").iterdir()) == []

    @pytest.mark.parametrize("last", [1, 2, 3, 4])
    def test_a_purge_that_is_killed_leaves_no_reason_without_its_file(
        self, plain_store: Store, monkeypatch: pytest.MonkeyPatch, last: int
    ) -> None:
        place = plain_store.data_dir / "quarantine"
        for name in ("a", "a.json", "b", "b.json"):
            (place / name).write_bytes(b"{}")
        steps = itertools.count(1)
        unlink = Path.unlink

        def until_killed(self: Path, missing_ok: bool = False) -> None:
            if next(steps) == last:
                raise KeyboardInterrupt
            unlink(self, missing_ok)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", until_killed)
            with pytest.raises(KeyboardInterrupt):
                plain_store.upkeep.purge_quarantine()
        left = {path.name for path in place.iterdir()}
        assert len(left) == 5 - last
        assert all(name.removesuffix(".json") in left for name in left)
        plain_store.upkeep.purge_quarantine()
        assert list(place.iterdir()) == []

    def test_whatever_lies_there_stops_nothing(self, plain_store: Store) -> None:
        place = plain_store.data_dir / "quarantine"
        (place / "a").write_bytes(b"no reason")
        (place / "b").mkdir()
        (place / "b" / "inside").write_bytes(b"x")
        (place / "c").write_bytes(b"x")
        (place / "c.json").write_text("{no json")
        (place / "d").symlink_to("/etc")
        (place / "d.json").write_text(json.dumps(["a list"]))
        assert [file.name for file in plain_store.upkeep.quarantined()] == ["a", "b", "c", "d"]
        assert plain_store.upkeep.purge_quarantine().files == 4
        assert list(place.iterdir()) == []
        assert Path("/etc").is_dir()


def test_a_mode_that_lets_others_read_is_told_and_mended(plain_store: Store) -> None:
    [sample] = samples_of(plain_store, "secret")
    plain_store.chunks.publish([sample.item])
    path_of(plain_store, sample.item).chmod(0o644)
    [problem] = damages(plain_store)
    assert (problem.kind, problem.detail) == ("mode", "its mode is 644, not 400")
    ingest(plain_store, plain_store.catalog.create_collection(T, new_collection()), "secret", publish=False)
    assert [problem.repaired for problem in plain_store.verify(repair=True)] == [True]
    assert path_of(plain_store, sample.item).stat().st_mode & 0o777 == 0o400
    assert plain_store.verify(full=True) == []


def test_compacting_gives_space_back(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "long " * 60_000, external_id="a", publish=False)  # its tokens take most
    store.delete_document(T, collection.id, "a")
    plan = store.upkeep.compact(dry_run=True)
    done = store.upkeep.compact()
    if store.database.is_sqlite:
        assert plan.bytes > 900_000
        assert done.bytes == done.bytes_before - done.bytes_after >= 0.9 * plan.bytes
    ingest(store, collection, "afterwards", external_id="b")
    assert found_texts(store, collection, "afterwards") == ["afterwards"]


class TestScrubber:
    def scrub(self, store: Store, *, hours: float = 1, rate: int = 1 << 40) -> tuple[int, int]:
        seen = scrub(
            store.chunks,
            store.catalog,
            older_than=timedelta(hours=hours),
            bytes_per_second=rate,
            stop=threading.Event(),
        )
        return seen.files, seen.damaged

    def age(self, store: Store, text: str, hours: float) -> None:
        """Moves the hour at which a file was written and read last."""
        [sample] = samples_of(store, text)
        with store.database.write() as transaction:
            row = store.catalog.find_file(sample.item.input_key)
            moment = row.created_at - timedelta(hours=hours)
            transaction.connection.execute(
                update(KVFile)
                .where(KVFile.input_key == row.file.input_key)
                .values(created_at=moment, verified_at=None)
            )

    def test_files_are_read_when_their_time_has_come(self, store: Store) -> None:
        publish_unused(store, "old\nnew")
        assert self.scrub(store) == (0, 0), "both were written just now"
        self.age(store, "old", 2)
        assert self.scrub(store) == (1, 0)
        assert self.scrub(store) == (0, 0), "it was read a moment ago"
        [sample] = samples_of(store, "old")
        assert store.catalog.find_file(sample.item.input_key).verified_at is not None

    def test_a_clock_that_went_back_stops_nothing(self, store: Store) -> None:
        publish_unused(store, "from the future")
        self.age(store, "from the future", -48)
        assert self.scrub(store) == (1, 0)
        assert self.scrub(store) == (0, 0)

    def test_damage_is_set_aside_before_anybody_needs_it(self, store: Store) -> None:
        publish_unused(store, "hurt\nsound")
        hurt, sound = samples_of(store, "hurt\nsound")
        flip(path_of(store, hurt.item), 5000)
        for text in ("hurt", "sound"):
            self.age(store, text, 2)
        assert self.scrub(store) == (2, 1)
        assert [reason["kind"] for reason in quarantined(store)] == ["digest"]
        assert store.catalog.file_for(T, hurt.item.input_key) is None
        assert is_exact(store, sound)
        store.chunks.publish([hurt.item])
        assert is_exact(store, hurt)

    def test_it_reads_no_faster_than_it_may(self, plain_store: Store) -> None:
        publish_unused(plain_store, "a\nb\nc")
        for text in "abc":
            self.age(plain_store, text, 2)
        rate = 10 * sum(file.num_bytes for file in plain_store.catalog.files_of_all_tenants())
        started = time.monotonic()
        assert self.scrub(plain_store, rate=rate) == (3, 0)
        assert time.monotonic() - started >= 0.1

    def test_verify_counts_as_reading(self, plain_store: Store) -> None:
        publish_unused(plain_store, "text")
        self.age(plain_store, "text", 2)
        plain_store.verify()
        assert plain_store.catalog.files_to_verify(10, timedelta(hours=1)) != []
        plain_store.verify(full=True)
        assert plain_store.catalog.files_to_verify(10, timedelta(hours=1)) == []


class TestUses:
    def test_uses_are_counted_written_and_survive(self, open_store: OpenStore) -> None:
        store = open_store()
        collection = store.catalog.create_collection(T, new_collection())
        ingest(store, collection, "asked for", external_id="a")
        [sample] = samples_of(store, "asked for")
        key = sample.item.input_key
        store.uses.note(T, [key])
        store.uses.note(T, [key])
        assert store.uses.count(T, key) == 2
        assert store.catalog.uses_of(key) == 0
        store.uses.flush()
        store.uses.flush()
        store.uses.note(T, [key])
        assert (store.uses.count(T, key), store.catalog.uses_of(key)) == (3, 2)
        store.close()
        assert open_store().catalog.uses_of(key) == 3

    def test_a_write_that_fails_loses_no_use(
        self, plain_store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain_store.uses.note(T, ["k"])

        def fail(_: object) -> None:
            raise ConflictError("no")

        with monkeypatch.context() as patch:
            patch.setattr(plain_store.catalog, "add_uses", fail)
            with pytest.raises(ConflictError):
                plain_store.uses.flush()
        assert plain_store.uses.count(T, "k") == 1

    def test_uses_of_keys_that_no_chunk_has_go(self, store: Store, collection: CollectionRow) -> None:
        ingest(store, collection, "stays", external_id="a")
        [stays] = samples_of(store, "stays")
        gone = input_key(store.catalog.tenant_secret(T), "00" * 32, (), tokens_of("gone"))
        store.uses.note(T, [stays.item.input_key, gone])
        store.uses.flush()
        store.upkeep.collect_garbage()
        assert store.catalog.uses_of(stays.item.input_key) == 1
        assert store.catalog.uses_of(gone) == 0


def test_a_renewed_collection_has_no_chunks_and_its_documents_wait(
    store: Store, collection: CollectionRow
) -> None:
    ingest(store, collection, "one\ntwo", external_id="a")
    ingest(store, collection, "three", external_id="b")
    found_texts(store, collection, "one")
    other_model = new_collection(fingerprint_digest="77" * 32, dim=4, prefix_ids=(1,), model_name="other")
    renewed = store.renew_collection(collection, other_model)
    assert len(renewed.released.files) == 3
    assert files_in(store) == 0
    row = store.catalog.get_collection(T, collection.name)
    assert (row.fingerprint_digest, row.dim, row.model_name) == ("77" * 32, 4, "other")
    assert row.prefix_key != collection.prefix_key
    assert row.generation > collection.generation
    page = store.catalog.list_documents(T, collection.id, PageRequest())
    assert {(d.external_id, d.status, d.revision, d.num_chunks) for d in page.rows} == {
        ("a", "pending", 2, 0),
        ("b", "pending", 2, 0),
    }
    job = store.jobs.claim("worker", kinds=("ingest",))
    assert job is not None
    assert renewed.job is not None
    assert job.id == renewed.job.id
    assert len(store.jobs.items(T, job.id)) == 2
    assert len(store.indexes.get(row)) == 0
    assert store.catalog.pending_documents() == []


def test_a_worker_claims_only_its_kinds(store: Store, collection: CollectionRow) -> None:
    store.jobs.create(T, "", "verify", (), unit="files", arguments={"full": False})
    store.accept_documents(T, collection.id, [NewDocument("text")])
    ingest_job = store.jobs.claim("a", kinds=("ingest", "reprefill"))
    verify_job = store.jobs.claim("b", kinds=("verify",))
    assert ingest_job is not None
    assert verify_job is not None
    assert (ingest_job.kind, dict(ingest_job.arguments)) == ("ingest", {})
    assert (verify_job.kind, dict(verify_job.arguments)) == ("verify", {"full": False})
    assert store.jobs.claim("c") is None


def test_every_number_is_a_metric_of_its_own(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "hurt\nsound", external_id="a")
    [hurt, _] = samples_of(store, "hurt\nsound")
    flip(path_of(store, hurt.item), 5000)
    assert load(store, hurt.item) is None
    metrics = list(store_metrics(store, Archives(store.data_dir), StoreConfig(), Scrubbed(files=3)))
    values = {metric.name: dict(metric.samples) for metric in metrics}
    assert len(values) == len(metrics)
    assert values["memkv_kv_files"] == {"": 1}
    assert values["memkv_kv_damaged"] == {"digest": 1}
    assert values["memkv_quarantine_files"] == {"": 1}
    assert values["memkv_documents"] == {"pending": 0, "ready": 1, "failed": 0}
    assert values["memkv_jobs"]["succeeded"] == 1
    assert values["memkv_scrubbed_files"] == {"": 3}
    assert set(values["memkv_collection_kv_bytes"]) == {collection.name}
    assert all(metric.help and (metric.label or list(metric.samples) == [""]) for metric in metrics)


def test_copies_are_metrics(plain_store: Store) -> None:
    archives = Archives(plain_store.data_dir)

    def values() -> list[float]:
        found = {
            metric.name: metric.samples
            for metric in store_metrics(plain_store, archives, StoreConfig(), Scrubbed())
        }
        names = ("snapshots", "snapshot_bytes", "archives", "archive_bytes")
        return [found[f"memkv_{name}"][""] for name in names]

    assert values() == [0, 0, 0, 0]
    made = plain_store.snapshots.create()
    archives.for_writing("a.tar").write_bytes(b"12345")
    assert values() == [1, made.database_bytes, 1, 5]
