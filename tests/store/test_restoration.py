"""What a server does between two servings: the job that tells of a restoration outlives the database."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_samples import OpenStore, found_texts, ingest, new_collection

from memkv.errors import ConfigError, StoreLocked
from memkv.store import DEFAULT_TENANT
from memkv.store.catalog_restores import begin_restore
from memkv.store.restoration import restore_between
from memkv.store.rows import PageRequest

T = DEFAULT_TENANT


pytestmark = pytest.mark.usefixtures("client_programs")


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
