"""A snapshot that a server brings its store back to, between two servings.

The job that tells of it is written down before and after: the database that knew of it is replaced, and the
one that replaces it never heard of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sqlalchemy import delete, insert, update

from memkv.errors import MemKVError
from memkv.store.catalog_jobs import RESTORE, insert_job
from memkv.store.catalog_store import now
from memkv.store.database import Database
from memkv.store.rows import JobRow, Problem
from memkv.store.snapshots import restore_snapshot
from memkv.store.store import Store
from memkv.store.tables import Job


def begin_restore(database: Database, tenant: str, snapshot_id: str, owner: str) -> JobRow:
    """A running job that no worker claims. An opening that finds it ends it as failed."""
    started = now()
    with database.write() as transaction:
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


def restore_between(
    data_dir: Path, database_url: str | None, job: JobRow, *, busy_seconds: float
) -> MemKVError | None:
    """Brings the closed store back to the job's snapshot, upgrades the schema, and ends the job.

    Returns why it could not be restored; the store is then as it was.

    Raises:
        MemKVError: the store cannot be opened.
    """
    failure: MemKVError | None = None
    try:
        restore_snapshot(data_dir, database_url, str(job.arguments["snapshot"]), busy_seconds=busy_seconds)
    except MemKVError as error:
        failure = error
    with Store.open(data_dir, database_url, upgrade=True, busy_seconds=busy_seconds) as store:
        _end(store.database, job, failure)
    return failure


def _end(database: Database, job: JobRow, failure: MemKVError | None) -> None:
    """Writes down what became of the job, whether or not this database knows of it."""
    error: Problem | None = None
    if failure is not None:
        error = {
            "code": failure.code,
            "status": failure.status,
            "detail": failure.detail,
            "hint": failure.hint,
        }
    with database.write() as transaction:
        connection = transaction.connection
        connection.execute(delete(Job).where(Job.id == job.id))
        connection.execute(
            insert(Job).values(
                id=job.id,
                tenant=job.tenant,
                collection_id="",
                kind=RESTORE,
                status="succeeded" if error is None else "failed",
                sequence=transaction.generation,
                stage="restored" if error is None else "failed",
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
