"""What takes several requests, without IO: a generator that yields calls and is sent their replies.

Those about the store are in `store_plans`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memkv.errors import BadRequestError, ConflictError, DocumentNotFound
from memkv.sdk import requests
from memkv.sdk.call import Call
from memkv.sdk.replies import error_of_problem
from memkv.sdk.source import File, read_document
from memkv.wire import Accepted, Document, Job, Metadata

T = TypeVar("T")
Plan = Generator[Call[Any], Any, T]
OnProgress = Callable[[Job], None]

FINISHED = frozenset({"succeeded", "partial", "failed", "cancelled"})
_LONG_WAIT = 20.0  # of one request
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
        if current.status in FINISHED or left <= 0:
            return current


def end_job(job: Job | None, wait: bool | float, on_progress: OnProgress | None) -> Plan[Job | None]:
    """The job, finished or as it stands when the wait is over. Raises what it failed with."""
    seconds = seconds_of(wait)
    if job is None or seconds == 0:
        return job
    timeout = None if seconds == math.inf else seconds
    job = yield from wait_for_job(job, timeout=timeout, on_progress=on_progress)
    raise_failure(job)
    return job


def raise_failure(job: Job) -> None:
    if job.status == "cancelled":
        raise ConflictError(f"the job {job.id} was cancelled", hint=f"memkv jobs retry {job.id}")
    if job.status == "failed" and job.errors:
        raise error_of_problem(job.errors[0])


def _ingest(
    collection: str,
    document: Any,
    keyed: bool,
    wait: bool | float,
    on_progress: OnProgress | None,
) -> Plan[Accepted]:
    seconds = seconds_of(wait)
    if not seconds >= 0:
        raise BadRequestError("wait must not be negative", hint="give True, False or a number of seconds")
    deadline = time.monotonic() + seconds
    first_wait = 0.0 if on_progress is not None else min(seconds, _LONG_WAIT)
    accepted: Accepted = yield requests.ingest_document(collection, document, keyed=keyed, wait=first_wait)
    job = accepted.job
    if job is None or seconds == 0:
        return accepted
    if job.status not in FINISHED or on_progress is not None:
        left = None if seconds == math.inf else max(0.0, deadline - time.monotonic())
        job = yield from wait_for_job(job, timeout=left, on_progress=on_progress)
        accepted = yield from _refresh(collection, accepted, job)
    raise_failure(job)
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


def seconds_of(wait: bool | float) -> float:
    """`wait=True` is for ever, False not at all."""
    if wait is True:
        return math.inf
    return float(wait)
