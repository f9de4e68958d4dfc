"""Statements by which jobs end, and by which they are taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, exists, or_, select, update
from sqlalchemy.orm import aliased

from memkv.errors import ConflictError
from memkv.store.catalog_files import in_batches
from memkv.store.catalog_jobs import JOB_COLUMNS, LIVE, MAX_ATTEMPTS, NO_LEASE, RESTORE, job_row
from memkv.store.catalog_store import now
from memkv.store.database import WriteTransaction
from memkv.store.rows import JobRow
from memkv.store.tables import Document, Job, JobDocument

CANCELLED = {
    "code": "cancelled",
    "status": 409,
    "detail": "the job was cancelled before this was done",
    "hint": "memkv jobs retry JOB",
}
GIVEN_UP = {
    "code": "given_up",
    "detail": f"the server stopped {MAX_ATTEMPTS} times while it worked on this job",
}
NOT_RESTORED = {
    "code": "conflict",
    "detail": "the server stopped before the snapshot was restored",
    "hint": "restore it again",
}
_NOT_DONE = {"code": "not_done", "detail": "the job ended before this document was ready"}


def end_job(connection: Connection, job_id: str, status: str, values: Mapping[str, Any]) -> None:
    connection.execute(
        update(Job).where(Job.id == job_id).values(status=status, finished_at=now(), **NO_LEASE, **values)
    )
    other_item, other_job = aliased(JobDocument), aliased(Job)
    in_other_hands = (
        exists()
        .where(other_item.document_id == Document.id, other_item.job_id != job_id)
        .where(other_job.id == other_item.job_id, other_job.status.in_(LIVE))
    )
    reason = CANCELLED if status == "cancelled" else _NOT_DONE
    left_over = select(JobDocument.document_id).where(JobDocument.job_id == job_id)
    connection.execute(
        update(Document)
        .where(Document.id.in_(left_over), Document.status == "pending", ~in_other_hands)
        .values(status="failed", error=values.get("error") or reason, updated_at=now())
    )


def end_cancelled(connection: Connection, *which: ColumnElement[bool]) -> None:
    """Those of these running jobs that shall be cancelled end: nobody works on them any more."""
    asked = connection.execute(
        select(Job.id).where(Job.status == "running", Job.cancel_requested == 1, *which)
    )
    for job_id in asked.scalars().all():
        end_job(connection, job_id, "cancelled", {"error": CANCELLED})


def abandon_jobs(connection: Connection, tenant: str, collection_id: str) -> None:
    """The collection is being deleted: its queued jobs end, its running ones are asked to."""
    own = (Job.tenant == tenant, Job.collection_id == collection_id)
    connection.execute(
        update(Job)
        .where(*own, Job.status == "queued")
        .values(status="cancelled", error=CANCELLED, finished_at=now())
    )
    connection.execute(update(Job).where(*own, Job.status == "running").values(cancel_requested=1))


def requeue_left_behind(transaction: WriteTransaction) -> tuple[int, int]:
    """See `Jobs.requeue_left_behind`."""
    connection = transaction.connection
    left_behind = (
        Job.status == "running",
        or_(Job.lease_epoch.is_(None), Job.lease_epoch != transaction.epoch),
    )
    end_cancelled(connection, *left_behind)
    hopeless = connection.execute(select(Job.id).where(*left_behind, Job.attempts >= MAX_ATTEMPTS))
    given_up = [job_id for job_id in hopeless.scalars().all() if not _give_up_documents(connection, job_id)]
    unrestored = connection.execute(select(Job.id).where(*left_behind, Job.kind == RESTORE))
    for job_id in unrestored.scalars().all():
        end_job(connection, job_id, "failed", {"error": NOT_RESTORED})
    for job_id in given_up:
        end_job(connection, job_id, "failed", {"error": GIVEN_UP})
    queued = connection.execute(update(Job).where(*left_behind).values(status="queued", **NO_LEASE)).rowcount
    return queued, len(given_up)


def cancel_job(transaction: WriteTransaction, job_id: str) -> None:
    """See `Jobs.cancel`."""
    job = _job(transaction, job_id)
    if job.is_finished:
        raise ConflictError(
            f"the job has ended already: {job.status}", hint=f"what it came to: memkv jobs show {job_id}"
        )
    if job.kind == RESTORE:
        raise ConflictError(
            "a restoration cannot be cancelled", hint="wait for it, then restore another snapshot"
        )
    if job.status == "queued":
        end_job(transaction.connection, job_id, "cancelled", {"error": CANCELLED})
    else:
        transaction.connection.execute(update(Job).where(Job.id == job_id).values(cancel_requested=1))


def retry_job(transaction: WriteTransaction, job_id: str) -> None:
    """See `Jobs.retry`."""
    job = _job(transaction, job_id)
    if not job.is_finished:
        raise ConflictError(f"the job has not ended: {job.status}", hint=f"memkv jobs watch {job_id}")
    if job.kind == RESTORE:
        raise ConflictError(
            "a restoration is begun anew, not tried again", hint="memkv store snapshot restore SNAPSHOT"
        )
    if job.status == "succeeded" or not _requeue_undone(transaction, job):
        raise ConflictError(
            "nothing of the job is left to be tried again",
            hint="what failed since is another job's: memkv jobs list --status failed",
        )
    transaction.connection.execute(
        update(Job)
        .where(Job.id == job.id)
        .values(
            status="queued",
            stage="queued",
            sequence=transaction.generation,
            attempts=0,
            cancel_requested=0,
            error=None,
            started_at=None,
            finished_at=None,
        )
    )


def make_pending(connection: Connection, *which: ColumnElement[bool]) -> dict[str, int]:
    """Failed documents are to be seen to again; returns their ids with the bytes of their texts."""
    changed = connection.execute(
        update(Document)
        .where(Document.status == "failed", *which)
        .values(status="pending", error=None, updated_at=now())
        .returning(Document.id, Document.text_bytes)
    )
    return {row.id: row.text_bytes for row in changed}


def _give_up_documents(connection: Connection, job_id: str) -> bool:
    """Fails the documents that were worked on whenever the process died, and lets the job begin anew with
    the others; False where none is known.
    """
    running = (JobDocument.job_id == job_id, JobDocument.status == "running")
    poison = list(connection.execute(select(JobDocument.document_id).where(*running)).scalars())
    if not poison:
        return False
    connection.execute(update(JobDocument).where(*running).values(status="failed", error=GIVEN_UP))
    connection.execute(
        update(Document)
        .where(Document.id.in_(poison), Document.status == "pending")
        .values(status="failed", error=GIVEN_UP, updated_at=now())
    )
    # Not from zero: the rest is still worked on one by one.
    connection.execute(update(Job).where(Job.id == job_id).values(attempts=1))
    return True


def _requeue_undone(transaction: WriteTransaction, job: JobRow) -> bool:
    """Whether anything of an ended job is to be done again: what of its documents it left undone, but for
    those that are done, deleted or in other hands by now; or the whole of a job about no documents.
    """
    connection = transaction.connection
    own = JobDocument.job_id == job.id
    if connection.execute(select(JobDocument.document_id).where(own).limit(1)).first() is None:
        return True
    undone = select(JobDocument.document_id).where(own, JobDocument.status != "succeeded")
    if job.kind == "ingest":
        again = list(make_pending(connection, Document.id.in_(undone)))
    else:
        again = list(connection.execute(select(Document.id).where(Document.id.in_(undone))).scalars())
    if not again:
        return False
    connection.execute(update(JobDocument).where(own).values(status="succeeded", error=None))
    for batch in in_batches(again):
        connection.execute(
            update(JobDocument).where(own, JobDocument.document_id.in_(batch)).values(status="queued")
        )
    return True


def _job(transaction: WriteTransaction, job_id: str) -> JobRow:
    return job_row(*transaction.connection.execute(select(*JOB_COLUMNS).where(Job.id == job_id)).one())
