"""The queue of jobs: order, progress, cancelling, waiting, and what a killed worker leaves."""

from __future__ import annotations

import threading
import time

import pytest
from sqlalchemy import text
from store_samples import OpenStore, commit, found_texts, new_collection

from memkv.errors import ConflictError, JobNotFound
from memkv.store import DEFAULT_TENANT, Store, jobs
from memkv.store.catalog_job_ends import CANCELLED
from memkv.store.catalog_jobs import MAX_ATTEMPTS
from memkv.store.rows import CollectionRow, NewDocument, PageRequest

T = DEFAULT_TENANT


def queue(store: Store, collection: CollectionRow, text: str) -> str:
    accepted = store.accept_documents(T, collection.id, [NewDocument(text)])
    assert accepted.job is not None
    return accepted.job.id


def test_jobs_are_claimed_in_order_and_once(store: Store, collection: CollectionRow) -> None:
    queued = [queue(store, collection, f"{number}") for number in range(6)]
    assert store.jobs.get(T, queued[0]).status == "queued"
    claimed: list[str] = []
    guard = threading.Lock()

    def work(owner: str) -> None:
        while (job := store.jobs.claim(owner)) is not None:
            with guard:
                claimed.append(job.id)

    first = store.jobs.claim("first")
    assert first is not None
    assert (first.id, first.status, first.attempts) == (queued[0], "running", 1)
    assert first.started_at is not None
    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(queued[1:])
    assert store.jobs.claim("late") is None


def test_the_order_does_not_hang_on_the_clock(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = queue(store, collection, "a")
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)  # back to 1970: ids sort before
    second = queue(store, collection, "b")
    assert second < first
    claimed = store.jobs.claim("w")
    assert claimed is not None
    assert claimed.id == first


def test_progress_is_seen_at_once_and_written_rarely(store: Store, collection: CollectionRow) -> None:
    job_id = queue(store, collection, "a")
    store.jobs.progress(job_id, stage="early", done=1, total=2, unit="chunks")
    assert store.jobs.get(T, job_id).stage == "queued", "a job that is not running has no progress"
    store.jobs.claim("w")
    before = store.catalog.generation()
    for done in range(200):
        store.jobs.progress(job_id, stage="prefilling", done=done, total=200, unit="chunks")
    job = store.jobs.get(T, job_id)
    assert (job.stage, job.done, job.total, job.unit) == ("prefilling", 199, 200, "chunks")
    assert store.jobs.list(T, PageRequest()).rows[0].done == 199
    assert store.catalog.generation() - before <= 2, "progress wrote to the database each time"
    store.jobs.finish(job_id, "succeeded", counts={"chunks": 200})
    job = store.jobs.get(T, job_id)
    assert (job.status, job.done, job.counts) == ("succeeded", 199, {"chunks": 200})
    assert job.finished_at is not None


def test_waiting_ends_when_the_job_does(store: Store, collection: CollectionRow) -> None:
    job_id = queue(store, collection, "a")
    began = time.monotonic()
    assert store.jobs.wait(T, job_id, 0.05).status == "queued"
    threading.Timer(0.1, store.jobs.finish, (job_id, "succeeded")).start()
    assert store.jobs.wait(T, job_id, 10).status == "succeeded"
    assert time.monotonic() - began < 8


def test_an_idle_worker_wakes_when_a_job_comes(store: Store, collection: CollectionRow) -> None:
    before = store.catalog.generation()
    assert store.jobs.claim("w", timeout=0.05) is None
    assert store.catalog.generation() == before, "an idle worker wrote"
    threading.Timer(0.1, queue, (store, collection, "a")).start()
    began = time.monotonic()
    assert store.jobs.claim("w", timeout=20) is not None
    assert time.monotonic() - began < 10


def test_cancelling(store: Store, collection: CollectionRow) -> None:
    queued, running = queue(store, collection, "a"), queue(store, collection, "b")
    assert store.jobs.cancel(T, queued).status == "cancelled"
    claimed = store.jobs.claim("w")
    assert claimed is not None
    assert claimed.id == running
    assert not store.jobs.is_cancelled(running)
    job = store.jobs.cancel(T, running)
    assert (job.status, job.cancel_requested) == ("running", True)
    assert store.jobs.is_cancelled(running)
    assert store.jobs.cancel(T, running).cancel_requested, "it may be asked for twice"
    store.jobs.finish(running, "cancelled", error={"code": "cancelled"})
    with pytest.raises(ConflictError, match="ended already: cancelled"):
        store.jobs.cancel(T, running)
    failed = store.catalog.list_documents(T, collection.id, PageRequest(), status="failed").rows
    assert [row.error and row.error["code"] for row in failed] == ["cancelled", "cancelled"]
    with pytest.raises(JobNotFound):
        store.jobs.cancel(T, "job_" + "0" * 32)


def test_a_worker_may_ask_often_whether_to_stop(
    store: Store, collection: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = queue(store, collection, "a")
    assert not store.jobs.is_cancelled(job_id), "nobody works on it here"
    assert store.jobs.claim("w") is not None
    monkeypatch.setattr(jobs, "_ASK_SECONDS", 60.0)
    assert not store.jobs.is_cancelled(job_id)
    with monkeypatch.context() as patched:
        patched.setattr(store.database, "read", None)
        assert not store.jobs.is_cancelled(job_id), "the database is asked each time"
    with store.database.write() as transaction:
        transaction.connection.execute(text("UPDATE jobs SET cancel_requested = 1"))
    monkeypatch.setattr(jobs, "_ASK_SECONDS", 0.0)
    assert store.jobs.is_cancelled(job_id)
    monkeypatch.setattr(store.database, "read", None)
    assert store.jobs.is_cancelled(job_id), "that does not change any more"


@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_job_that_was_asked_to_stop_is_not_taken_up_again(open_store: OpenStore, how: str) -> None:
    store = open_store()
    collection = store.catalog.create_collection(T, new_collection())
    job_id = queue(store, collection, "a")
    assert store.jobs.claim("w") is not None
    store.jobs.cancel(T, job_id)
    if how == "released":
        store.jobs.release(job_id)
    else:
        store.close()
        store = open_store()
        assert store.recovery.jobs_queued == 0
    job = store.jobs.get(T, job_id)
    assert (job.status, job.error) == ("cancelled", CANCELLED)
    [document] = store.catalog.list_documents(T, collection.id, PageRequest()).rows
    assert (document.status, document.error) == ("failed", CANCELLED)
    assert store.jobs.claim("w") is None


class TestTriedAgain:
    def accept(self, store: Store, collection: CollectionRow, *texts: str) -> tuple[str, list[str]]:
        documents = [NewDocument(text, external_id=text) for text in texts]
        accepted = store.accept_documents(T, collection.id, documents)
        assert accepted.job is not None
        return accepted.job.id, [entry.document.id for entry in accepted.documents]

    def test_only_what_failed_and_what_was_not_come_to(self, store: Store, collection: CollectionRow) -> None:
        job_id, ids = self.accept(store, collection, "done", "failed", "gone", "renewed", "left")
        store.jobs.claim("w")
        done, failed = (store.catalog.document_by_id(T, each) for each in ids[:2])
        commit(store, done, "done")
        store.jobs.finish_item(job_id, done.id, "succeeded")
        problem = {"code": "model_failed"}
        assert store.catalog.fail_document(T, failed.id, failed.revision, problem)
        for each in ids[1:3]:
            store.jobs.finish_item(job_id, each, "failed", problem)
        with pytest.raises(ConflictError, match="has not ended: running"):
            store.jobs.retry(T, job_id)
        store.jobs.cancel(T, job_id)
        store.jobs.finish(job_id, "cancelled", counts={"documents": 1}, error=CANCELLED)
        later = queue(store, collection, "queued a moment ago")
        store.delete_document(T, collection.id, "gone")
        self.accept(store, collection, "renewed")

        job = store.jobs.retry(T, job_id)
        assert (job.status, job.attempts, job.cancel_requested, job.error) == ("queued", 0, False, None)
        assert (job.started_at, job.finished_at, job.counts) == (None, None, {"documents": 1})
        states = {item.document_id: (item.status, item.error) for item in store.jobs.items(T, job_id)}
        waiting = {key for key, state in states.items() if state == ("queued", None)}
        assert waiting == {ids[1], ids[4]}
        assert all(state[0] == "succeeded" for key, state in states.items() if key not in waiting)
        for each in waiting:
            document = store.catalog.document_by_id(T, each)
            assert (document.status, document.error, document.revision) == ("pending", None, 1)
        order = [store.jobs.claim("w") for _ in range(3)]
        ids = [each and each.id for each in order]
        assert ids[0] == later
        assert ids[2] == job_id, "it is the last in the queue"

    def test_nothing_where_nothing_is_left(self, store: Store, collection: CollectionRow) -> None:
        job_id, _ = self.accept(store, collection, "a")
        store.jobs.finish(job_id, "failed", error={"code": "x"})
        store.delete_document(T, collection.id, "a")
        with pytest.raises(ConflictError, match="nothing of the job is left"):
            store.jobs.retry(T, job_id)
        assert store.jobs.get(T, job_id).status == "failed"
        other = queue(store, collection, "b")
        store.jobs.finish(other, "succeeded")
        with pytest.raises(ConflictError, match="nothing of the job is left"):
            store.jobs.retry(T, other)
        with pytest.raises(JobNotFound):
            store.jobs.retry(T, "job_" + "0" * 32)

    def test_documents_that_are_ready_and_lack_their_kv(
        self, store: Store, collection: CollectionRow
    ) -> None:
        first, ids = self.accept(store, collection, "a", "b")
        for name, each in zip("ab", ids, strict=True):
            commit(store, store.catalog.document_by_id(T, each), name)
        store.jobs.finish(first, "succeeded")
        job_id = store.jobs.create(T, collection.id, "reprefill", ids).id
        store.jobs.finish_item(job_id, ids[0], "succeeded")
        store.jobs.finish_item(job_id, ids[1], "failed", {"code": "x"})
        store.jobs.finish(job_id, "partial")
        store.jobs.retry(T, job_id)
        assert [item.status for item in store.jobs.items(T, job_id)] == ["succeeded", "queued"]
        assert store.catalog.document_by_id(T, ids[1]).status == "ready"

    def test_a_job_about_the_whole_store(self, store: Store) -> None:
        job_id = store.jobs.create(T, "", "verify", (), arguments={"full": True}).id
        store.jobs.finish(job_id, "failed", error={"code": "x"})
        assert store.jobs.retry(T, job_id).arguments == {"full": True}
        again = store.jobs.claim("w")
        assert again is not None
        assert (again.id, again.attempts) == (job_id, 1)


def test_a_job_that_ends_leaves_no_document_pending_but_those_in_other_hands(
    store: Store, collection: CollectionRow
) -> None:
    accepted = store.accept_documents(
        T, collection.id, [NewDocument(text, external_id=text) for text in ("done", "left", "renewed")]
    )
    assert accepted.job is not None
    done, left, renewed = (one.document for one in accepted.documents)
    commit(store, done, "done")
    newer = store.accept_documents(T, collection.id, [NewDocument("newer", external_id="renewed")])
    store.jobs.finish_item(accepted.job.id, done.id, "succeeded")
    store.jobs.finish_item(accepted.job.id, left.id, "failed", {"code": "model_failed"})
    store.jobs.finish(accepted.job.id, "partial", counts={"ready": 1})
    states = {
        row.id: row.status for row in store.catalog.list_documents(T, collection.id, PageRequest()).rows
    }
    assert states == {done.id: "ready", left.id: "failed", renewed.id: "pending"}
    items = store.jobs.items(T, accepted.job.id)
    assert [item.status for item in items] == ["succeeded", "failed", "queued"]
    assert items[1].error == {"code": "model_failed"}
    assert newer.job is not None
    store.jobs.finish(newer.job.id, "failed", error={"code": "x"})
    assert store.catalog.document_by_id(T, renewed.id).error == {"code": "x"}


def test_deleting_a_collection_ends_its_jobs(store: Store, collection: CollectionRow) -> None:
    running, queued = queue(store, collection, "a"), queue(store, collection, "b")
    store.jobs.claim("w")
    store.delete_collection(T, collection.name)
    assert store.jobs.get(T, queued).status == "cancelled"
    assert store.jobs.get(T, running).cancel_requested
    assert store.jobs.is_cancelled(running)
    store.jobs.finish(running, "cancelled")


def test_jobs_are_listed_by_what_they_are(store: Store, collection: CollectionRow) -> None:
    done, waiting = queue(store, collection, "a"), queue(store, collection, "b")
    store.jobs.finish(done, "succeeded")
    other = store.jobs.create(T, "col_other", "verify", [])

    def listed(**kinds: str) -> set[str]:
        return {row.id for row in store.jobs.list(T, PageRequest(), **kinds).rows}  # type: ignore[arg-type]

    assert listed() == {done, waiting, other.id}
    assert listed(status="queued") == {waiting, other.id}
    assert listed(kind="verify") == {other.id}
    assert listed(collection_id=collection.id) == {done, waiting}


def test_jobs_of_a_killed_process_run_again_but_not_for_ever(open_store: OpenStore) -> None:
    store = open_store()
    collection = store.catalog.create_collection(T, new_collection())
    job_id = queue(store, collection, "a")
    for attempt in range(1, MAX_ATTEMPTS + 1):
        job = store.jobs.claim("w")
        assert job is not None
        assert (job.id, job.attempts) == (job_id, attempt)
        store.close()  # without a word about the job
        store = open_store()
        expected = (1, 0) if attempt < MAX_ATTEMPTS else (0, 1)
        assert (store.recovery.jobs_queued, store.recovery.jobs_given_up) == expected
    job = store.jobs.get(T, job_id)
    assert (job.status, job.error and job.error["code"]) == ("failed", "given_up")
    page = store.catalog.list_documents(T, collection.id, PageRequest(), status="failed")
    assert len(page.rows) == 1


def test_a_worker_that_shuts_down_gives_its_job_back_untried(open_store: OpenStore) -> None:
    store = open_store()
    collection = store.catalog.create_collection(T, new_collection())
    job_id = queue(store, collection, "a")
    for _ in range(MAX_ATTEMPTS + 2):
        assert store.jobs.claim("w") is not None
        store.jobs.release(job_id)
        assert store.jobs.get(T, job_id).attempts == 0
        store.close()
        store = open_store()
        assert store.recovery.jobs_queued == 0


def test_a_pending_document_that_lost_its_job_gets_one(open_store: OpenStore) -> None:
    store = open_store()
    collection = store.catalog.create_collection(T, new_collection())
    job_id = queue(store, collection, "a")
    with store.database.write() as transaction:
        transaction.connection.execute(text("DELETE FROM jobs WHERE id = :id"), {"id": job_id})
    store.close()
    store = open_store()
    assert store.recovery.documents_queued == 1
    job = store.jobs.claim("w")
    assert job is not None
    [item] = store.jobs.items(T, job.id)
    document = store.catalog.document_by_id(T, item.document_id)
    commit(store, document, "a")
    assert found_texts(store, collection, "a") == ["a"]


def test_only_the_document_that_takes_the_process_down_is_given_up(open_store: OpenStore) -> None:
    """A worker that dies each time while it has the second of three documents in hand."""
    store = open_store()
    collection = store.catalog.create_collection(T, new_collection())
    documents = [NewDocument(text, external_id=text) for text in ("first", "poison", "last")]
    accepted = store.accept_documents(T, collection.id, documents)
    ids = [entry.document.id for entry in accepted.documents]
    assert accepted.job is not None
    for attempt in range(1, MAX_ATTEMPTS + 1):
        job = store.jobs.claim("worker")
        assert job is not None
        assert job.attempts == attempt
        if attempt > 1:
            store.jobs.finish_item(job.id, ids[0], "succeeded")
            store.jobs.start_item(job.id, ids[1])
        store.close()
        store = open_store()
    assert store.recovery.jobs_queued == 1
    assert store.recovery.jobs_given_up == 0
    items = store.jobs.items(T, job.id)
    assert [item.status for item in items] == ["succeeded", "failed", "queued"]
    assert items[1].error is not None
    assert items[1].error["code"] == "given_up"
    poison = store.catalog.document_by_id(T, ids[1])
    assert (poison.status, (poison.error or {})["code"]) == ("failed", "given_up")
    again = store.jobs.claim("worker")
    assert again is not None
    assert (again.id, again.attempts) == (job.id, 2), "the rest goes on, one by one"


def test_a_shutdown_is_no_attempt_and_leaves_no_document_in_hand(
    store: Store, collection: CollectionRow
) -> None:
    accepted = store.accept_documents(T, collection.id, [NewDocument("text")])
    job = store.jobs.claim("worker")
    assert job is not None
    store.jobs.start_item(job.id, accepted.documents[0].document.id)
    store.jobs.release(job.id)
    assert [item.status for item in store.jobs.items(T, job.id)] == ["queued"]
    again = store.jobs.claim("worker")
    assert again is not None
    assert again.attempts == 1
