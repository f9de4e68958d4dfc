"""Jobs: rows that a worker claims, reports on and finishes.

    queued -> running -> succeeded | partial | failed | cancelled
       ^         |                        │
       ├─────────┘  released at a shutdown, or found running at an opening
       └──────────────────────────────────┘  tried again

A running job belongs to the epoch that claimed it, so that a later opening knows without any clock which ones
were left behind. Its heartbeat says for people when the process was last heard of, and lets a process that
lost the store know so in the middle of a long piece of work. Progress is kept in memory and written at most
once a second: reporting it costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, get_args

from sqlalchemy import func, literal, select, update

from memkv.errors import InsufficientStorageError, JobNotFound, StoreFenced
from memkv.store.catalog_job_ends import (
    cancel_job,
    end_cancelled,
    end_job,
    requeue_left_behind,
    retry_job,
)
from memkv.store.catalog_jobs import JOB_COLUMNS, NO_LEASE, insert_job, job_row
from memkv.store.catalog_store import now
from memkv.store.database import Database
from memkv.store.heartbeat import Heartbeat
from memkv.store.paging import read_page
from memkv.store.plain_values import checked_text
from memkv.store.rows import JobItem, JobRow, JobStatus, Page, PageRequest, Problem
from memkv.store.tables import Collection, Document, Job, JobDocument, Moment

_FLUSH_SECONDS = 1.0
_ASK_SECONDS = 0.2
_HEARTBEAT_SECONDS = 5.0


@dataclass(slots=True)
class _Progress:
    stage: str
    done: int
    total: int
    unit: str
    written_at: float  # monotonic, as the next one
    asked_at: float = -inf  # whether it is cancelled
    is_cancelled: bool = False


class Jobs:
    """Thread-safe. Raises DatabaseUnavailable, DatabaseDamaged, InsufficientStorageError, StoreFenced."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changed = threading.Condition()  # guards the two below
        self._progress: dict[str, _Progress] = {}  # of the jobs this process runs
        self._events = 0  # jobs queued, finished or cancelled so far
        self._lost: StoreFenced | None = None  # once the store is another process's
        self._heartbeat = Heartbeat(self.beat, _HEARTBEAT_SECONDS)

    def close(self) -> None:
        self._heartbeat.stop()

    def create(
        self,
        tenant: str,
        collection_id: str,
        kind: str,
        document_ids: Sequence[str],
        *,
        unit: str = "documents",
        arguments: Mapping[str, object] | None = None,
    ) -> JobRow:
        checked_text("the job's kind", kind, max_chars=64)
        with self._database.write() as transaction:
            row = insert_job(
                transaction,
                tenant,
                collection_id,
                kind,
                document_ids,
                total=len(document_ids),
                unit=unit,
                arguments=arguments,
            )
        self.announce()
        return row

    def get(self, tenant: str, job_id: str) -> JobRow:
        """With the progress of this moment. Raises JobNotFound."""
        checked_text("the job's id", job_id, max_chars=256)
        with self._database.read() as connection:
            row = connection.execute(
                select(*JOB_COLUMNS).where(Job.tenant == tenant, Job.id == job_id)
            ).first()
        if row is None:
            raise job_not_found(job_id)
        return self._with_progress(job_row(*row))

    def list(
        self,
        tenant: str,
        page: PageRequest,
        *,
        status: JobStatus | None = None,
        kind: str | None = None,
        collection_id: str | None = None,
        within: frozenset[str] | None = None,
    ) -> Page[JobRow]:
        """`within`: only jobs of the tenant's collections of these names."""
        statement = select(*JOB_COLUMNS).where(Job.tenant == tenant)
        if status is not None:
            statement = statement.where(Job.status == status)
        if kind is not None:
            statement = statement.where(Job.kind == checked_text("the job's kind", kind, max_chars=64))
        if collection_id is not None:
            statement = statement.where(Job.collection_id == collection_id)
        if within is not None:
            named = select(Collection.id).where(Collection.tenant == tenant, Collection.name.in_(within))
            statement = statement.where(Job.collection_id.in_(named))
        with self._database.read() as connection:
            page_read = read_page(connection, statement, page, order_by=Job.id, make=job_row)
        return replace(page_read, rows=tuple(self._with_progress(row) for row in page_read.rows))

    def count_by_status(self) -> dict[str, int]:
        """Of all tenants."""
        counted = dict.fromkeys(get_args(JobStatus), 0)
        with self._database.read() as connection:
            rows = connection.execute(select(Job.status, func.count()).group_by(Job.status)).all()
        return counted | dict(rows)

    def items(self, tenant: str, job_id: str) -> tuple[JobItem, ...]:
        with self._database.read() as connection:
            rows = connection.execute(
                select(
                    JobDocument.document_id,
                    JobDocument.status,
                    JobDocument.error,
                    func.coalesce(Document.text_bytes, 0),
                )
                .join(Job, Job.id == JobDocument.job_id)
                .outerjoin(Document, Document.id == JobDocument.document_id)
                .where(Job.tenant == tenant, Job.id == job_id)
                .order_by(JobDocument.ordinal)
            ).all()
        return tuple(JobItem(*row) for row in rows)

    def queued(self, kind: str) -> tuple[JobRow, ...]:
        """Of all tenants, in order."""
        statement = select(*JOB_COLUMNS).where(Job.status == "queued", Job.kind == kind)
        with self._database.read() as connection:
            rows = connection.execute(statement.order_by(Job.sequence, Job.id)).all()
        return tuple(job_row(*row) for row in rows)

    def claim(self, owner: str, *, kinds: Sequence[str] | None = None, timeout: float = 0.0) -> JobRow | None:
        """The job, of these kinds, that waited longest, now running; None where none came.

        Waits for up to `timeout` seconds, or until `announce` wakes it: a worker that shall stop then can.
        """
        with self._changed:
            seen = self._events
        job = self._claim(owner, kinds)
        if job is not None or timeout <= 0:
            return job
        with self._changed:
            woken = self._changed.wait_for(lambda: self._events != seen, timeout)
        return self._claim(owner, kinds) if woken else None

    def progress(self, job_id: str, *, stage: str, done: int, total: int, unit: str) -> None:
        """Reports on a running job; written to the database once a second at most, on a full disk not."""
        with self._changed:
            if self._lost is not None:
                raise self._lost
            live = self._progress.get(job_id)
            if live is None:
                return
            live.stage, live.done, live.total, live.unit = stage, done, total, unit
            due = time.monotonic() - live.written_at >= _FLUSH_SECONDS
            if due:
                live.written_at = time.monotonic()
        if due:
            with suppress(InsufficientStorageError), self._database.write() as transaction:
                transaction.connection.execute(
                    update(Job)
                    .where(Job.id == job_id, Job.status == "running")
                    .values(stage=stage, done=done, total=total, unit=unit)
                )

    def beat(self) -> None:
        """Says in the rows of the jobs that run here that they do."""
        with self._changed:
            running = list(self._progress)
        if not running:
            return
        try:
            with self._database.write() as transaction:
                transaction.connection.execute(
                    update(Job)
                    .where(Job.id.in_(running), Job.lease_epoch == transaction.epoch)
                    .values(heartbeat_at=now())
                )
        except StoreFenced as error:
            with self._changed:
                self._lost = error
            raise

    def is_cancelled(self, job_id: str) -> bool:
        """Whether the worker should stop; asked between two pieces of work, as often as one likes."""
        with self._changed:
            live = self._progress.get(job_id)
            if live is not None and (live.is_cancelled or time.monotonic() < live.asked_at + _ASK_SECONDS):
                return live.is_cancelled
        with self._database.read() as connection:
            asked = connection.execute(select(Job.cancel_requested).where(Job.id == job_id)).scalar()
        if live is not None:
            with self._changed:
                live.asked_at, live.is_cancelled = time.monotonic(), live.is_cancelled or asked != 0
        return asked != 0

    def start_item(self, job_id: str, document_id: str) -> None:
        """Says which document is worked on: if the process dies of it, the next one knows which it was."""
        with self._database.write() as transaction:
            transaction.connection.execute(
                update(JobDocument)
                .where(JobDocument.job_id == job_id, JobDocument.document_id == document_id)
                .values(status="running")
            )

    def finish_item(
        self,
        job_id: str,
        document_id: str,
        status: Literal["succeeded", "failed"],
        error: Problem | None = None,
    ) -> None:
        with self._database.write() as transaction:
            transaction.connection.execute(
                update(JobDocument)
                .where(JobDocument.job_id == job_id, JobDocument.document_id == document_id)
                .values(status=status, error=None if error is None else dict(error))
            )

    def finish(
        self,
        job_id: str,
        status: Literal["succeeded", "partial", "failed", "cancelled"],
        *,
        counts: Mapping[str, object] | None = None,
        error: Problem | None = None,
    ) -> None:
        """Ends a job. Documents it leaves pending, and no other job works on, fail with `error`."""
        with self._changed:
            live = self._progress.get(job_id)
        values: dict[str, Any] = {
            "counts": dict(counts or {}),
            "error": None if error is None else dict(error),
        }
        if live is not None:
            values.update(stage=live.stage, done=live.done, total=live.total, unit=live.unit)
        with self._database.write() as transaction:
            end_job(transaction.connection, job_id, status, values)
        with self._changed:
            self._progress.pop(job_id, None)
        self.announce()

    def release(self, job_id: str) -> None:
        """Gives a running job back to the queue, as if it had not been tried: a worker that shuts down.

        One that shall be cancelled ends.
        """
        with self._database.write() as transaction:
            end_cancelled(transaction.connection, Job.id == job_id)
            transaction.connection.execute(
                update(Job)
                .where(Job.id == job_id, Job.status == "running")
                .values(status="queued", attempts=Job.attempts - 1, **NO_LEASE)
            )
            transaction.connection.execute(
                update(JobDocument)
                .where(JobDocument.job_id == job_id, JobDocument.status == "running")
                .values(status="queued")
            )
        with self._changed:
            self._progress.pop(job_id, None)
        self.announce()

    def cancel(self, tenant: str, job_id: str) -> JobRow:
        """A queued job ends at once; a running one is asked to.

        Raises:
            JobNotFound.
            ConflictError: it has ended already, or restores a snapshot.
        """
        self.get(tenant, job_id)
        with self._database.write() as transaction:
            cancel_job(transaction, job_id)
        with self._changed:
            live = self._progress.get(job_id)
            if live is not None:
                live.is_cancelled = True
        self.announce()
        return self.get(tenant, job_id)

    def retry(self, tenant: str, job_id: str) -> JobRow:
        """Queues a job again that did not succeed, for what it left undone.

        Raises:
            JobNotFound.
            ConflictError: it has not ended, it succeeded, or nothing of it is left to be done.
        """
        self.get(tenant, job_id)
        with self._database.write() as transaction:
            retry_job(transaction, job_id)
        self.announce()
        return self.get(tenant, job_id)

    def announce(self) -> None:
        """Wakes every waiting thread: a job was queued or ended, or the worker shall look around."""
        with self._changed:
            self._events += 1
            self._changed.notify_all()

    def wait(self, tenant: str, job_id: str, timeout: float) -> JobRow:
        """The job, finished, or as it stands after `timeout` seconds. Raises JobNotFound."""
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                seen = self._events
            job = self.get(tenant, job_id)
            left = deadline - time.monotonic()
            if job.is_finished or left <= 0:
                return job
            with self._changed:
                self._changed.wait_for(lambda: self._events != seen, min(left, 0.5))  # noqa: B023

    def requeue_left_behind(self) -> tuple[int, int]:
        """At an opening: jobs of earlier epochs are queued again, or given up after `MAX_ATTEMPTS`.

        Where the document is known that took the process down each time (`start_item`), only that one is
        given up. Returns how many jobs were queued and how many given up.
        """
        with self._database.write() as transaction:
            queued, given_up = requeue_left_behind(transaction)
        self.announce()
        return queued, given_up

    def _claim(self, owner: str, kinds: Sequence[str] | None) -> JobRow | None:
        waiting = select(Job.id).where(Job.status == "queued").order_by(Job.sequence, Job.id).limit(1)
        if kinds is not None:
            waiting = waiting.where(Job.kind.in_(kinds))
        with self._database.read() as connection:  # an idle worker writes nothing
            if connection.execute(waiting).scalar() is None:
                return None
        with self._database.write() as transaction:
            connection = transaction.connection
            job_id = connection.execute(waiting.with_for_update(skip_locked=True)).scalar()
            if job_id is None:
                return None
            row = connection.execute(
                update(Job)
                .where(Job.id == job_id)
                .values(
                    status="running",
                    attempts=Job.attempts + 1,
                    lease_epoch=transaction.epoch,
                    lease_owner=owner,
                    heartbeat_at=now(),
                    started_at=func.coalesce(Job.started_at, literal(now(), Moment())),
                )
                .returning(*JOB_COLUMNS)
            ).one()
        job = job_row(*row)
        with self._changed:
            self._progress[job.id] = _Progress(job.stage, job.done, job.total, job.unit, time.monotonic())
        return job

    def _with_progress(self, job: JobRow) -> JobRow:
        with self._changed:
            live = self._progress.get(job.id)
            if live is None or job.is_finished:
                return job
            return replace(job, stage=live.stage, done=live.done, total=live.total, unit=live.unit)


def job_not_found(job_id: str) -> JobNotFound:
    return JobNotFound(f"job {job_id[:128]!r} does not exist", hint="memkv jobs list shows those that do")
