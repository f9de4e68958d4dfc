"""Keeping a store through each kind of client: archives, snapshots, and a server that is away for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from held_engine import HeldEngine

from memkv.errors import (
    APIConnectionError,
    ConflictError,
    DatabaseUnavailable,
    EngineClosed,
    JobNotFound,
    MemKVError,
    NotFoundError,
)
from memkv.memory import Memory
from memkv.sdk import store_plans
from memkv.sdk.binding import follow
from memkv.sdk.call import Call
from memkv.wire import Job, JobCounts, JobProgress, Snapshot, SnapshotWork, StoreWork, problem_for

SNAPSHOT = Snapshot(
    id="snp_" + "0" * 32,
    time="2025-01-01T00:00:00+00:00",
    store_id="0" * 32,
    dialect="sqlite",
    generation=1,
    kv_files=0,
    kv_bytes=0,
    database_bytes=1,
)


def test_archives_by_name(client: Any, collection: str) -> None:
    client.collections.create(collection)
    client.documents.create(collection, text="The gate is green.", external_id="gate")
    archive = f"{collection}.tar"
    would = client.store.export(archive, [collection], dry_run=True)
    assert (would.job, would.exported.documents) == (None, 1)
    assert archive not in [file.name for file in client.store.archives().data]
    seen: list[str] = []
    done = client.store.export(archive, [collection], on_progress=lambda job: seen.append(job.kind))
    assert done.job.status == "succeeded"
    assert set(seen) == {"export"}
    assert done.exported.bytes > would.exported.bytes
    assert archive in [file.name for file in client.store.archives().data]
    with pytest.raises(ConflictError):
        client.store.export(archive, [collection])
    looked = client.store.import_(archive, dry_run=True)
    assert (looked.imported.documents, looked.imported.dry_run) == (1, True)
    client.collections.delete(collection)
    came = client.store.import_(archive)
    assert (came.imported.collections, came.imported.failed) == ([collection], 0)
    assert client.documents.retrieve(collection, "gate").status == "ready"
    started = client.store.import_(archive, wait=False)
    assert started.imported is None
    assert client.jobs.wait(started.job).imported.documents == 1
    client.store.delete_archive(archive)
    with pytest.raises(NotFoundError):
        client.store.import_(archive)


def test_a_snapshot_is_not_restored_under_an_open_store(client: Any) -> None:
    """Neither of these servers, nor a memory in this process, is opened again by anybody."""
    made = client.store.create_snapshot().snapshot
    could = client.store.check_snapshot(made.id)
    assert (could.dry_run, could.snapshot, could.job) == (True, made, None)
    with pytest.raises(ConflictError) as caught:
        client.store.restore_snapshot(made.id)
    assert "memkv store snapshot restore" in caught.value.hint
    client.store.delete_snapshot(made.id)


def test_what_makes_room_and_what_keeps_are_followed_to_their_end(client: Any, collection: str) -> None:
    client.collections.create(collection)
    client.documents.create(collection, text=f"The gate of {collection} is green.", external_id="gate")
    plan = client.store.evict(collection=collection, dry_run=True)
    assert (plan.dry_run, plan.job, plan.change.dry_run) == (True, None, True)
    seen: list[Job] = []
    done = client.store.evict(collection=collection, on_progress=seen.append)
    assert (done.job.kind, done.job.status, done.job.change) == ("evict", "succeeded", done.change)
    assert (done.change.files, done.change.dry_run) == (plan.change.files, False)
    assert done.change.bytes_after < done.change.bytes_before
    assert {each.id for each in seen} == {done.job.id}
    for work in (client.store.gc(), client.store.compact(), client.store.purge_quarantine()):
        assert work.job.status == "succeeded"
        assert work.change == work.job.change
    started = client.store.gc(wait=False)
    assert started.change.dry_run
    assert client.jobs.wait(started.job).change is not None
    assert client.store.create_snapshot(dry_run=True).snapshot.id == ""
    unmade = client.store.create_snapshot(wait=False)
    assert unmade.snapshot.id == ""
    made = client.jobs.wait(unmade.job).snapshot
    assert made in client.store.snapshots().data
    client.store.delete_snapshot(made.id)


def test_a_job_is_cancelled_and_tried_again(
    client: Any, memory: Memory, collection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.collections.create(collection)
    engine = HeldEngine(memory, monkeypatch)
    first = client.documents.create(collection, text=f"The gate of {collection} is green.", wait=False).job
    assert engine.reached.wait(30)
    second = client.documents.create(
        collection, text=f"The door of {collection} is red.", external_id="d", wait=False
    ).job
    assert client.jobs.cancel(second).status == "cancelled"
    with pytest.raises(ConflictError, match="ended already"):
        client.jobs.cancel(second.id)
    assert client.documents.retrieve(collection, "d").error.code == "cancelled"
    engine.open.set()
    assert client.jobs.retry(second, wait=60).status == "succeeded"
    assert client.documents.retrieve(collection, "d").status == "ready"
    assert client.jobs.wait(first).status == "succeeded"
    with pytest.raises(ConflictError, match="nothing of the job is left"):
        client.jobs.retry(second.id)
    with pytest.raises(JobNotFound):
        client.jobs.cancel("job_none")


def test_who_waits_for_a_job_that_is_cancelled_is_told() -> None:
    work = StoreWork(dry_run=False, files=1, tokens=0, bytes=1, job=job("running"))
    server = Restoring(work, job("cancelled"))
    with pytest.raises(ConflictError, match="was cancelled") as caught:
        follow(server, store_plans.verify_store())
    assert caught.value.hint == "memkv jobs retry job_1"


class Restoring:
    """A sender whose server restores: it answers what the list says, one after the other."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def send(self, call: Call[Any]) -> Any:
        self.asked.append(call.path)
        answer = self.answers.pop(0)
        if isinstance(answer, MemKVError):
            raise answer
        return answer

    def open_stream(self, call: Call[Any]) -> Any:
        raise AssertionError

    def close(self) -> None: ...


def job(status: Any, *, failed_with: MemKVError | None = None) -> Job:
    return Job(
        id="job_1",
        kind="restore",
        collection="",
        status=status,
        progress=JobProgress(),
        counts=JobCounts(),
        errors=[] if failed_with is None else [problem_for(failed_with)],
        attempts=1,
        created_at="2025-01-01T00:00:00Z",
    )


STARTED = SnapshotWork(dry_run=False, snapshot=SNAPSHOT, job=job("running"))


@pytest.mark.parametrize("away", [lambda: EngineClosed("it drains"), lambda: APIConnectionError("it is cut")])
def test_a_server_that_is_away_while_it_restores_is_waited_for(away: Callable[[], MemKVError]) -> None:
    server = Restoring(STARTED, job("running"), *(away() for _ in range(19)), job("succeeded"))
    work = follow(server, store_plans.restore_snapshot(SNAPSHOT.id))
    assert work.job == job("succeeded")
    assert server.answers == []
    assert server.asked[0].endswith("/restore")


def test_a_server_that_stays_away_is_given_up() -> None:
    server = Restoring(STARTED, *(EngineClosed("it drains") for _ in range(20)))
    with pytest.raises(EngineClosed):
        follow(server, store_plans.restore_snapshot(SNAPSHOT.id))
    assert server.answers == []


def test_what_the_job_failed_with_is_raised_at_once() -> None:
    """Although it is an error that a server which is away for a moment would give, too."""
    server = Restoring(STARTED, job("failed", failed_with=DatabaseUnavailable("pg_restore failed")))
    with pytest.raises(DatabaseUnavailable, match="pg_restore failed"):
        follow(server, store_plans.restore_snapshot(SNAPSHOT.id))


def test_who_does_not_wait_asks_once() -> None:
    server = Restoring(STARTED)
    assert follow(server, store_plans.restore_snapshot(SNAPSHOT.id, wait=False)) == STARTED
