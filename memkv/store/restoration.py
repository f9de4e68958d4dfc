"""A snapshot that a server brings its store back to, between two servings."""

from __future__ import annotations

from pathlib import Path

from memkv.errors import MemKVError
from memkv.store.catalog_restores import end_restore
from memkv.store.rows import JobRow, Problem
from memkv.store.snapshots import restore_snapshot
from memkv.store.store import Store


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
        restore_snapshot(
            data_dir, database_url, str(job.arguments["snapshot"]), busy_seconds=busy_seconds, job=job
        )
    except MemKVError as error:
        failure = error
    with Store.open(data_dir, database_url, upgrade=True, busy_seconds=busy_seconds) as store:
        if failure is not None:  # else the opening knows it from the journal
            end_restore(store.database, job, _problem(failure))
    return failure


def _problem(error: MemKVError) -> Problem:
    return {"code": error.code, "status": error.status, "detail": error.detail, "hint": error.hint}
