"""Statements about jobs that stand inside other transactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, insert, select, update

from memkv.store.catalog_store import now
from memkv.store.database import WriteTransaction
from memkv.store.ids import new_id
from memkv.store.rows import JobRow
from memkv.store.tables import Document, Job, JobDocument

MAX_ATTEMPTS = 3  # a job that takes the process down each time is given up
RESTORE = "restore"  # the kind of jobs that no worker claims: see catalog_restores.py
SNAPSHOT = "snapshot"  # the kind of jobs that an opening ends where their snapshot is there

LIVE = ("queued", "running")
JOB_COLUMNS = (
    Job.id,
    Job.tenant,
    Job.collection_id,
    Job.kind,
    Job.status,
    Job.stage,
    Job.done,
    Job.total,
    Job.unit,
    Job.counts,
    Job.error,
    Job.attempts,
    Job.cancel_requested,
    Job.created_at,
    Job.started_at,
    Job.finished_at,
    Job.arguments,
    Job.lease_owner,
    Job.heartbeat_at,
)
NO_LEASE = {"lease_epoch": None, "lease_owner": None, "heartbeat_at": None}


def insert_job(
    transaction: WriteTransaction,
    tenant: str,
    collection_id: str,
    kind: str,
    document_ids: Sequence[str],
    *,
    total: int,
    unit: str,
    arguments: Mapping[str, object] | None = None,
) -> JobRow:
    """Queues a job within the caller's transaction."""
    job = JobRow(
        id=new_id("job"),
        tenant=tenant,
        collection_id=collection_id,
        kind=kind,
        status="queued",
        stage="queued",
        done=0,
        total=total,
        unit=unit,
        counts={},
        error=None,
        attempts=0,
        cancel_requested=False,
        created_at=now(),
        started_at=None,
        finished_at=None,
        arguments=arguments or {},
    )
    transaction.connection.execute(
        insert(Job).values(
            id=job.id,
            tenant=tenant,
            collection_id=collection_id,
            kind=kind,
            status=job.status,
            sequence=transaction.generation,
            stage=job.stage,
            done=0,
            total=total,
            unit=unit,
            counts={},
            attempts=0,
            cancel_requested=0,
            created_at=job.created_at,
            arguments=None if arguments is None else dict(arguments),
        )
    )
    if document_ids:
        transaction.connection.execute(
            insert(JobDocument),
            [
                {"job_id": job.id, "ordinal": ordinal, "document_id": document_id, "status": "queued"}
                for ordinal, document_id in enumerate(document_ids)
            ],
        )
    return job


def renew_documents(
    transaction: WriteTransaction,
    tenant: str,
    collection_id: str,
    arguments: Mapping[str, object] | None = None,
) -> JobRow | None:
    """Makes every document of a collection pending again, and queues one job for them."""
    connection = transaction.connection
    own = (Document.tenant == tenant, Document.collection_id == collection_id)
    rows = connection.execute(select(Document.id, Document.text_bytes).where(*own).order_by(Document.id))
    sizes = {row.id: row.text_bytes for row in rows}
    if not sizes:
        return None
    connection.execute(
        update(Document)
        .where(*own)
        .values(
            status="pending",
            revision=Document.revision + 1,
            error=None,
            num_chunks=0,
            num_tokens=0,
            updated_at=now(),
        )
    )
    return insert_job(
        transaction,
        tenant,
        collection_id,
        "ingest",
        list(sizes),
        total=sum(sizes.values()),
        unit="bytes",
        arguments=arguments,
    )


def live_job_of(connection: Connection, document_id: str) -> str | None:
    """The queued or running job that will see to this document."""
    return connection.execute(
        select(Job.id)
        .join(JobDocument, JobDocument.job_id == Job.id)
        .where(JobDocument.document_id == document_id, Job.status.in_(LIVE))
        .order_by(Job.sequence.desc())
        .limit(1)
    ).scalar()


def job_row(*values: Any) -> JobRow:
    row = JobRow(*values)
    return replace(row, cancel_requested=bool(row.cancel_requested), arguments=row.arguments or {})
