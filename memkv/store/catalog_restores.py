"""Statements about the job that tells of a restored snapshot.

It is written down before and after: the database that knew of it is replaced, and the one that replaces it
never heard of it.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import delete, insert, select, update

from memkv.errors import ConflictError
from memkv.store.catalog_jobs import RESTORE, insert_job
from memkv.store.catalog_store import now
from memkv.store.database import Database
from memkv.store.rows import JobRow, Problem
from memkv.store.tables import Job

_begun = select(Job.id).where(Job.kind == RESTORE, Job.status == "running")


def begin_restore(database: Database, tenant: str, snapshot_id: str, owner: str) -> JobRow:
    """A running job that no worker claims. An opening that finds it ends it as failed.

    Raises ConflictError where there is one already: the database that comes would know of one of them alone.
    """
    started = now()
    with database.write() as transaction:
        if transaction.connection.execute(_begun).first() is not None:
            raise ConflictError(
                "a snapshot is about to be restored already",
                hint="wait until the server serves again, then restore this one",
            )
        row = insert_job(
            transaction, tenant, "", RESTORE, (), total=0, unit="", arguments={"snapshot": snapshot_id}
        )
        transaction.connection.execute(
            update(Job)
            .where(Job.id == row.id)
            .values(
                status="running",
                attempts=1,
                started_at=started,
                lease_epoch=transaction.epoch,
                lease_owner=owner,
            )
        )
    return replace(row, status="running", attempts=1, started_at=started, owner=owner)


def tell_restored(database: Database, job: JobRow) -> None:
    """Ends a job that this database does not know as succeeded: it took the place of the one that did."""
    with database.read() as connection:
        known = connection.execute(select(Job.id).where(Job.id == job.id)).scalar()
    if known is None:
        end_restore(database, job, None)


def end_restore(database: Database, job: JobRow, error: Problem | None) -> None:
    """Writes down what became of the job, whether or not this database knows of it."""
    status = "succeeded" if error is None else "failed"
    with database.write() as transaction:
        connection = transaction.connection
        connection.execute(delete(Job).where(Job.id == job.id))
        connection.execute(
            insert(Job).values(
                id=job.id,
                tenant=job.tenant,
                collection_id="",
                kind=RESTORE,
                status=status,
                sequence=transaction.generation,
                stage=status,
                done=0,
                total=0,
                unit="",
                counts={},
                error=error,
                attempts=job.attempts,
                cancel_requested=0,
                created_at=job.created_at,
                started_at=job.started_at,
                finished_at=now(),
                arguments=dict(job.arguments),
            )
        )
