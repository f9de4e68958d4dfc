"""What a server does between two servings: the job that tells of a restoration outlives the database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from forker import SIGKILLED, Forker
from store_samples import OpenStore, found_texts, ingest, new_collection

from memkv.errors import ConfigError, ConflictError, JobNotFound, StoreLocked
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.catalog_restores import begin_restore, end_restore
from memkv.store.ids import new_id
from memkv.store.restoration import restore_between
from memkv.store.rows import PageRequest
from memkv.store.snapshots import restore_snapshot

T = DEFAULT_TENANT


pytestmark = pytest.mark.usefixtures("client_programs")


@pytest.fixture(scope="module")
def worker() -> Iterator[Forker]:
    started = Forker("restoration_worker.py")
    yield started
    started.close()


def test_the_database_that_is_there_then_knows_the_job(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store()
    row = store.catalog.create_collection(T, new_collection())
    ingest(store, row, "before")
    made = store.snapshots.create()
    ingest(store, row, "after")
    job = begin_restore(store.database, T, made.id, "pid 7")
    known = store.jobs.get(T, job.id)
    assert (known.status, known.kind, known.owner) == ("running", "restore", "pid 7")
    assert known.arguments == job.arguments == {"snapshot": made.id}
    assert store.jobs.claim("worker", timeout=0.0) is None, "a worker took it"
    with pytest.raises(StoreLocked):
        restore_between(data_dir, database_url, job, busy_seconds=0.2)
    store.close()

    assert restore_between(data_dir, database_url, job, busy_seconds=5.0) is None
    store = open_store()
    row = store.catalog.get_collection(T, "papers")
    assert found_texts(store, row, "x") == ["before"]
    ended = store.jobs.get(T, job.id)
    assert (ended.status, ended.error, ended.attempts) == ("succeeded", None, 1)
    assert ended.created_at == job.created_at
    assert ended.finished_at is not None


def test_one_that_fails_leaves_the_store_as_it_was_and_says_why(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store()
    row = store.catalog.create_collection(T, new_collection())
    made = store.snapshots.create()
    ingest(store, row, "after")
    job = begin_restore(store.database, T, made.id, "pid 7")
    store.close()
    (data_dir / "snapshots" / made.id / "database").unlink()
    failure = restore_between(data_dir, database_url, job, busy_seconds=5.0)
    assert isinstance(failure, ConfigError)
    assert failure.detail == "the snapshot's database is damaged"
    store = open_store()
    assert found_texts(store, store.catalog.get_collection(T, "papers"), "x") == ["after"]
    ended = store.jobs.get(T, job.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error["detail"] == failure.detail


def test_another_is_not_begun_beside_it(open_store: OpenStore) -> None:
    """Whoever began it would wait for a job that the database which comes has never heard of."""
    store = open_store()
    made = store.snapshots.create()
    begin_restore(store.database, T, made.id, "pid 7")
    with pytest.raises(ConflictError, match="about to be restored already"):
        begin_restore(store.database, T, made.id, "pid 7")
    store.close()
    store = open_store()
    assert begin_restore(store.database, T, made.id, "pid 8").status == "running", "the first never came"


def test_one_that_a_kill_forestalled_is_told(open_store: OpenStore) -> None:
    store = open_store()
    made = store.snapshots.create()
    job = begin_restore(store.database, T, made.id, "pid 7")
    store.close()
    store = open_store()
    ended = store.jobs.get(T, job.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error["hint"] == "restore it again"
    assert not store.jobs.list(T, PageRequest(), status="queued").rows


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_that_is_killed_while_the_database_is_replaced_is_told_as_it_is(
    worker: Forker, open_store: OpenStore, data_dir: Path, database_url: str | None, when: str
) -> None:
    """The client that waits for the job asks the server that is started again."""
    store = open_store()
    row = store.catalog.create_collection(T, new_collection())
    ingest(store, row, "before")
    made = store.snapshots.create()
    ingest(store, row, "after")
    job = begin_restore(store.database, T, made.id, "pid 7")
    store.close()
    assert worker.run(data_dir=str(data_dir), url=database_url, snapshot=made.id, when=when) == SIGKILLED
    assert (data_dir / "restoring.json").exists()

    for _ in range(2):
        store = open_store()
        ended = store.jobs.get(T, job.id)
        texts = found_texts(store, store.catalog.get_collection(T, "papers"), "x")
        store.close()
        if when == "before":
            assert (ended.status, ended.error and ended.error["hint"]) == ("failed", "restore it again")
            assert sorted(texts) == ["after", "before"]
        else:
            assert (ended.status, ended.error, ended.attempts) == ("succeeded", None, 1)
            assert texts == ["before"]
        assert (ended.created_at, ended.arguments) == (job.created_at, {"snapshot": made.id})
        assert ended.started_at == job.started_at
        assert not (data_dir / "restoring.json").exists()


def test_a_restoration_by_hand_is_not_taken_for_an_interrupted_one(
    worker: Forker, open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    store = open_store()
    first, second = store.snapshots.create(), store.snapshots.create()
    job = begin_restore(store.database, T, first.id, "pid 7")
    store.close()
    assert worker.run(data_dir=str(data_dir), url=database_url, snapshot=first.id, when="before") == SIGKILLED
    restore_snapshot(data_dir, database_url, second.id)
    with pytest.raises(JobNotFound):
        open_store().jobs.get(T, job.id)


@pytest.mark.parametrize("content", [b"", b"{no json", b"[]", b'{"id": "job_1"}'])
def test_a_journal_that_says_nothing_stops_nothing(
    open_store: OpenStore, data_dir: Path, content: bytes
) -> None:
    open_store().close()
    (data_dir / "restoring.json").write_bytes(content)
    store = open_store()
    assert store.jobs.list(T, PageRequest()).rows == ()
    assert not (data_dir / "restoring.json").exists()


def test_a_restoration_is_neither_cancelled_nor_tried_again(store: Store) -> None:
    made = store.snapshots.create()
    job = begin_restore(store.database, T, made.id, "pid 7")
    with pytest.raises(ConflictError, match="cannot be cancelled"):
        store.jobs.cancel(T, job.id)
    end_restore(store.database, job, {"code": "conflict"})
    with pytest.raises(ConflictError, match="begun anew"):
        store.jobs.retry(T, job.id)


def test_the_job_that_made_a_snapshot_has_ended_in_it(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    """The copy was made while it ran; a snapshot that is deleted later is not to come back by it."""
    store = open_store()
    wanted = new_id("snp")
    job_id = store.jobs.create(T, "", "snapshot", (), arguments={"snapshot": wanted}).id
    assert store.jobs.claim("w") is not None
    made = store.snapshots.create(wanted)
    store.jobs.finish(job_id, "succeeded")
    waiting = store.jobs.create(T, "", "snapshot", (), arguments={"snapshot": new_id("snp")}).id
    store.close()
    restore_snapshot(data_dir, database_url, made.id)
    store = open_store()
    job = store.jobs.get(T, job_id)
    assert (job.status, job.counts) == ("succeeded", {"snapshot": asdict(made)})
    assert store.jobs.claim("w") is None
    with pytest.raises(JobNotFound):
        store.jobs.get(T, waiting)


def test_a_snapshot_of_an_older_memkv_has_no_digest_and_is_taken(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    import json

    store = open_store()
    made = store.snapshots.create()
    store.close()
    manifest = data_dir / "snapshots" / made.id / "manifest.json"
    told = json.loads(manifest.read_text())
    del told["database_digest"]
    manifest.chmod(0o600)
    manifest.write_text(json.dumps(told))
    with open_store() as store:
        job = begin_restore(store.database, T, made.id, "pid 7")
    assert restore_between(data_dir, database_url, job, busy_seconds=5.0) is None
