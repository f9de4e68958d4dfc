"""What takes several requests, without IO: a generator that yields calls and is sent their replies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memkv.errors import (
    APIConnectionError,
    BadRequestError,
    ConflictError,
    DocumentNotFound,
    ServiceUnavailableError,
)
from memkv.sdk import requests, store_requests
from memkv.sdk.call import Call
from memkv.sdk.replies import error_of_problem
from memkv.sdk.source import File, read_document
from memkv.wire import (
    Accepted,
    ArchiveWork,
    Document,
    Job,
    Metadata,
    SnapshotWork,
    StoreCollection,
    StoreExport,
    StoreImport,
    StoreVerify,
    StoreWork,
)

T = TypeVar("T")
Plan = Generator[Call[Any], Any, T]
OnProgress = Callable[[Job], None]

_FINISHED = frozenset({"succeeded", "partial", "failed", "cancelled"})
_LONG_WAIT = 20.0  # of one request
_MOST_FAILURES = 20  # of requests to a server that restores
_SHORT_WAIT = 0.25  # where somebody looks at the progress


def create_document(
    collection: str,
    *,
    text: str | None = None,
    file: File | None = None,
    path: str | Path | None = None,
    external_id: str | None = None,
    metadata: Metadata | None = None,
    title: str = "",
    wait: bool | float = True,
    on_progress: OnProgress | None = None,
) -> Plan[Accepted]:
    """Ingests one document from a text, a file or a path.

    Args:
        collection: its name.
        text, file, path: exactly one: a text; bytes, a binary file or a pair (name, bytes); a file's path.
        external_id: the caller's key; the same key again replaces the document.
        metadata: strings, numbers, booleans and None, to filter by.
        title: shown to the model with each chunk, and in citations.
        wait: True until the document is ready, False not at all, or a number of seconds.
        on_progress: called with the job, several times a second.

    Raises:
        MemKVError: what the job failed with, where it was waited for; else what the server refused.
    """
    document = read_document(
        text=text, file=file, path=path, external_id=external_id, metadata=metadata, title=title
    )
    return (yield from _ingest(collection, document, False, wait, on_progress))


def upsert_document(
    collection: str,
    external_id: str,
    *,
    text: str | None = None,
    file: File | None = None,
    path: str | Path | None = None,
    metadata: Metadata | None = None,
    title: str = "",
    wait: bool | float = True,
    on_progress: OnProgress | None = None,
) -> Plan[Accepted]:
    """Creates or replaces the document of this external id; arguments as in `create`."""
    document = read_document(
        text=text, file=file, path=path, external_id=external_id, metadata=metadata, title=title
    )
    return (yield from _ingest(collection, document, True, wait, on_progress))


def wait_for_job(
    job: Job | str, *, timeout: float | None = None, on_progress: OnProgress | None = None
) -> Plan[Job]:
    """The job when it is finished, whatever became of it, or as it stands after `timeout` seconds."""
    job_id = job if isinstance(job, str) else job.id
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _SHORT_WAIT if on_progress is not None else _LONG_WAIT
    while True:
        left = pause if deadline is None else deadline - time.monotonic()
        current: Job = yield requests.get_job(job_id, wait=max(0.0, min(pause, left)))
        if on_progress is not None:
            on_progress(current)
        if current.status in _FINISHED or left <= 0:
            return current


def verify_store(
    *,
    full: bool = True,
    deep: int = 0,
    repair: bool = False,
    max_seconds: float = 0,
    dry_run: bool = False,
    wait: bool | float = True,
    on_progress: OnProgress | None = None,
) -> Plan[StoreWork]:
    """Checks the database, every block file and every index; `job.verification` says what was found.

    Args:
        full: read every byte; else look at sizes and modes.
        deep: so many chunks, chosen by chance, are prefilled again and compared.
        repair: set damaged files aside, and remove what nothing refers to.
        max_seconds: then end and say how many files are left; the next verification begins with those. 0: no
            bound.
        dry_run: only say how much would be read.
        wait, on_progress: as in `documents.create`.
    """
    wanted = StoreVerify(full=full, deep=deep, repair=repair, max_seconds=max_seconds, dry_run=dry_run)
    return (yield from _work(store_requests.start_verify(wanted), wait, on_progress))


def warm_store(
    collection: str,
    *,
    dry_run: bool = False,
    wait: bool | float = True,
    on_progress: OnProgress | None = None,
) -> Plan[StoreWork]:
    """Reads a collection's block files, so that the system has them in memory when a question comes.

    Where a model is open, chunks are loaded too, up to `engine.warm_share` of its pool and host memory.
    """
    wanted = StoreCollection(collection=collection, dry_run=dry_run)
    return (yield from _work(store_requests.start_warm(wanted), wait, on_progress))


def reprefill_store(
    collection: str,
    *,
    dry_run: bool = False,
    wait: bool | float = True,
    on_progress: OnProgress | None = None,
) -> Plan[StoreWork]:
    """Makes the KV that a collection lacks; of one that another model made, everything for this model."""
    wanted = StoreCollection(collection=collection, dry_run=dry_run)
    return (yield from _work(store_requests.start_reprefill(wanted), wait, on_progress))


def export_store(
    archive: str,
    collections: Sequence[str] = (),
    *,
    kv: bool = False,
    dry_run: bool = False,
    wait: bool | float = True,
    on_progress: OnProgress | None = None,
) -> Plan[ArchiveWork]:
    """Writes collections, or all, to a new file in `archives/` of the data directory.

    Args:
        archive: its name, which ends with .tar.
        collections: their names; none: all.
        kv: their block files, too.
    """
    wanted = StoreExport(archive=archive, collections=list(collections), kv=kv, dry_run=dry_run)
    work: ArchiveWork = yield store_requests.start_export(wanted)
    job = yield from _end(work.job, wait, on_progress)
    return msgspec.structs.replace(work, job=job, exported=(job and job.exported) or work.exported)


def import_store(
    archive: str,
    *,
    kv: bool = False,
    dry_run: bool = False,
    wait: bool | float = True,
    on_progress: OnProgress | None = None,
) -> Plan[ArchiveWork]:
    """Ingests the collections of an archive in `archives/` of the data directory; nothing in it is trusted.

    Args:
        archive: its name.
        kv: take its block files for the same tokens, fingerprint and prefix: their values are on the word of
            who made it.
        dry_run: only check it and say what is in it.
    """
    wanted = StoreImport(archive=archive, kv=kv, dry_run=dry_run)
    work: ArchiveWork = yield store_requests.start_import(wanted)
    job = yield from _end(work.job, wait, on_progress)
    return msgspec.structs.replace(work, job=job, imported=job and job.imported)


def restore_snapshot(
    snapshot_id: str, *, wait: bool | float = True, on_progress: OnProgress | None = None
) -> Plan[SnapshotWork]:
    """Brings a server's store back to a snapshot: what came after it is gone.

    The server lets running requests end, restores, and serves again; meanwhile it answers nobody.
    """
    work: SnapshotWork = yield store_requests.start_restore(snapshot_id)
    assert work.job is not None, "bug: a restoration without a job"
    deadline = time.monotonic() + _seconds(wait)
    failures = 0
    while (left := deadline - time.monotonic()) > 0:
        timeout = None if left == math.inf else left
        try:
            job = yield from wait_for_job(work.job, timeout=timeout, on_progress=on_progress)
        except (ServiceUnavailableError, APIConnectionError):  # it drains, or is closed
            failures += 1
            if failures == _MOST_FAILURES:
                raise
        else:
            _raise_failure(job)
            return msgspec.structs.replace(work, job=job)
    return work


def _end(job: Job | None, wait: bool | float, on_progress: OnProgress | None) -> Plan[Job | None]:
    """The job, finished or as it stands when the wait is over. Raises what it failed with."""
    seconds = _seconds(wait)
    if job is None or seconds == 0:
        return job
    timeout = None if seconds == math.inf else seconds
    job = yield from wait_for_job(job, timeout=timeout, on_progress=on_progress)
    _raise_failure(job)
    return job


def _raise_failure(job: Job) -> None:
    if job.status == "failed" and job.errors:
        raise error_of_problem(job.errors[0])


def _work(call: Call[StoreWork], wait: bool | float, on_progress: OnProgress | None) -> Plan[StoreWork]:
    work: StoreWork = yield call
    job = yield from _end(work.job, wait, on_progress)
    if job is None or job.status not in _FINISHED:
        return msgspec.structs.replace(work, job=job)
    counts = job.counts
    return msgspec.structs.replace(
        work, job=job, bytes_before=counts.bytes_before, bytes_after=counts.bytes_after
    )


def _ingest(
    collection: str,
    document: Any,
    keyed: bool,
    wait: bool | float,
    on_progress: OnProgress | None,
) -> Plan[Accepted]:
    seconds = _seconds(wait)
    if not seconds >= 0:
        raise BadRequestError("wait must not be negative", hint="give True, False or a number of seconds")
    deadline = time.monotonic() + seconds
    first_wait = 0.0 if on_progress is not None else min(seconds, _LONG_WAIT)
    accepted: Accepted = yield requests.ingest_document(collection, document, keyed=keyed, wait=first_wait)
    job = accepted.job
    if job is None or seconds == 0:
        return accepted
    if job.status not in _FINISHED or on_progress is not None:
        left = None if seconds == math.inf else max(0.0, deadline - time.monotonic())
        job = yield from wait_for_job(job, timeout=left, on_progress=on_progress)
        accepted = yield from _refresh(collection, accepted, job)
    if job.status == "failed" and job.errors:
        raise error_of_problem(job.errors[0])
    if job.status == "cancelled":
        raise ConflictError(f"the job {job.id} was cancelled", hint="ingest the document again")
    return accepted


def _refresh(collection: str, accepted: Accepted, job: Job) -> Plan[Accepted]:
    documents = []
    for entry in accepted.documents:
        try:
            current: Document = yield requests.get_document(collection, entry.id)
        except DocumentNotFound:  # deleted meanwhile
            documents.append(entry)
        else:
            documents.append(msgspec.structs.replace(entry, status=current.status))
    return Accepted(job=job, documents=documents)


def _seconds(wait: bool | float) -> float:
    """`wait=True` is for ever, False not at all."""
    if wait is True:
        return math.inf
    return float(wait)
