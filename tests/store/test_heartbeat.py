"""Leases: renewed while a long piece of work says nothing, left by a kill, lost to another process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from store_samples import OpenStore, new_collection

from memkv.errors import StoreFenced, StoreLocked
from memkv.store import DEFAULT_TENANT, Store, jobs
from memkv.store.database import Database, parse_database_url
from memkv.store.rows import CollectionRow, NewDocument

T = DEFAULT_TENANT
WORKER = Path(__file__).with_name("lease_worker.py")


@pytest.fixture(autouse=True)
def _quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_HEARTBEAT_SECONDS", 0.1)


def test_a_job_is_its_servers_until_that_one_is_killed(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    """The server computes one long item, is stopped, goes on, and is killed with -9."""
    store = open_store()
    job_id = queue(store, store.catalog.create_collection(T, new_collection()))
    store.close()
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), str(data_dir), database_url or "", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    try:
        assert worker.stdout.readline().strip() == job_id
        watched = Database(parse_database_url(database_url, data_dir))
        seen = heartbeat(watched)
        wait_for(lambda: heartbeat(watched) > seen)
        with pytest.raises(StoreLocked):
            open_store(busy_seconds=0.2)
    finally:
        worker.kill()
        worker.wait()
    last = heartbeat(watched)
    time.sleep(0.3)
    assert heartbeat(watched) == last, "it gave signs of life after its death"
    watched.close()
    store = open_store()
    assert store.recovery.jobs_queued == 1
    job = store.jobs.get(T, job_id)
    assert (job.status, job.owner, job.heartbeat_at) == ("queued", None, None)
    again = store.jobs.claim("the next one")
    assert again is not None
    assert (again.id, again.attempts, again.owner) == (job_id, 2, "the next one")
    assert again.heartbeat_at is not None


def test_an_idle_process_writes_nothing(store: Store, collection: CollectionRow) -> None:
    queue(store, collection)
    before = store.catalog.generation()
    time.sleep(0.4)
    assert store.catalog.generation() == before


def test_a_finished_job_has_no_owner(store: Store, collection: CollectionRow) -> None:
    job_id = queue(store, collection)
    assert store.jobs.claim("w") is not None
    assert store.jobs.get(T, job_id).owner == "w"
    store.jobs.finish(job_id, "succeeded")
    job = store.jobs.get(T, job_id)
    assert (job.owner, job.heartbeat_at) == (None, None)


def test_a_process_that_lost_the_store_learns_of_it_in_the_middle(
    store: Store, collection: CollectionRow
) -> None:
    job_id = queue(store, collection)
    assert store.jobs.claim("w") is not None
    store.jobs.progress(job_id, stage="prefilling", done=1, total=9, unit="chunks")
    with store.database.write() as transaction:
        transaction.connection.execute(text("UPDATE store SET epoch = epoch + 1"))

    def is_told() -> bool:
        try:
            store.jobs.progress(job_id, stage="prefilling", done=1, total=9, unit="chunks")
        except StoreFenced:
            return True
        return False

    wait_for(is_told, seconds=0.9)  # before progress itself would be written


def test_a_busy_database_costs_one_beat(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(store, collection)
    job = store.jobs.claim("w")
    assert job is not None
    monkeypatch.setattr(store.database, "busy_seconds", 0.05)
    with store.database.write():
        time.sleep(0.4)
    seen = store.jobs.get(T, job.id).heartbeat_at
    wait_for(lambda: store.jobs.get(T, job.id).heartbeat_at != seen)


def queue(store: Store, collection: CollectionRow) -> str:
    accepted = store.accept_documents(T, collection.id, [NewDocument("a text")])
    assert accepted.job is not None
    return accepted.job.id


def heartbeat(database: Database) -> int:
    with database.read() as connection:
        return int(connection.execute(text("SELECT heartbeat_at FROM jobs")).scalar_one())


def wait_for(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
