"""What of the store takes several requests, without IO: generators, as in `plans`.

All of it are jobs. `wait` and `on_progress` are as in `documents.create`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec

from memkv.errors import APIConnectionError, ServiceUnavailableError
from memkv.sdk import store_requests
from memkv.sdk.call import Call
from memkv.sdk.plans import FINISHED, OnProgress, Plan, end_job, raise_failure, seconds_of, wait_for_job
from memkv.wire import (
    ArchiveWork,
    ChangeWork,
    SnapshotCreate,
    SnapshotWork,
    StoreCollection,
    StoreCompact,
    StoreEvict,
    StoreExport,
    StoreGC,
    StoreImport,
    StorePurge,
    StoreVerify,
    StoreWork,
)

_MOST_FAILURES = 20  # of requests to a server that restores


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


def collect_garbage(
    *,
    dry_run: bool = False,
    force: bool = False,
    wait: bool | float = True,
    on_progress: OnProgress | None = None,
) -> Plan[ChangeWork]:
    """Removes what nothing refers to.

    Args:
        dry_run: only say how much that is.
        force: although that is most of the store.
        wait, on_progress: as in `documents.create`.

    Raises:
        ConflictError: it is most of the store, and `force` does not say so.
    """
    wanted = StoreGC(dry_run=dry_run, force=force)
    return (yield from _change(store_requests.start_gc(wanted), wait, on_progress))


def evict(
    *,
    collection: str | None = None,
    to_bytes: int = 0,
    dry_run: bool = False,
    wait: bool | float = True,
    on_progress: OnProgress | None = None,
) -> Plan[ChangeWork]:
    """Removes KV, what was used longest ago first, until `to_bytes` are left of it."""
    wanted = StoreEvict(collection=collection, to_bytes=to_bytes, dry_run=dry_run)
    return (yield from _change(store_requests.start_evict(wanted), wait, on_progress))


def compact(
    *, dry_run: bool = False, wait: bool | float = True, on_progress: OnProgress | None = None
) -> Plan[ChangeWork]:
    """Gives the space of deleted rows back to the disk of the database."""
    return (
        yield from _change(store_requests.start_compact(StoreCompact(dry_run=dry_run)), wait, on_progress)
    )


def purge_quarantine(
    *, dry_run: bool = False, wait: bool | float = True, on_progress: OnProgress | None = None
) -> Plan[ChangeWork]:
    """Removes what was set aside."""
    return (yield from _change(store_requests.start_purge(StorePurge(dry_run=dry_run)), wait, on_progress))


def create_snapshot(
    *, dry_run: bool = False, wait: bool | float = True, on_progress: OnProgress | None = None
) -> Plan[SnapshotWork]:
    """Keeps the store as it is: a copy of the database, and links to the block files.

    The snapshot has no `id` where it is not made, or not yet.
    """
    work: SnapshotWork = yield store_requests.start_snapshot(SnapshotCreate(dry_run=dry_run))
    job = yield from end_job(work.job, wait, on_progress)
    return msgspec.structs.replace(work, job=job, snapshot=(job and job.snapshot) or work.snapshot)


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
    job = yield from end_job(work.job, wait, on_progress)
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
    job = yield from end_job(work.job, wait, on_progress)
    return msgspec.structs.replace(work, job=job, imported=job and job.imported)


def restore_snapshot(
    snapshot_id: str, *, wait: bool | float = True, on_progress: OnProgress | None = None
) -> Plan[SnapshotWork]:
    """Brings a server's store back to a snapshot: what came after it is gone.

    The server lets running requests end, restores, and serves again; meanwhile it answers nobody.
    """
    work: SnapshotWork = yield store_requests.start_restore(snapshot_id)
    assert work.job is not None, "bug: a restoration without a job"
    deadline = time.monotonic() + seconds_of(wait)
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
            raise_failure(job)
            return msgspec.structs.replace(work, job=job)
    return work


def _work(call: Call[StoreWork], wait: bool | float, on_progress: OnProgress | None) -> Plan[StoreWork]:
    work: StoreWork = yield call
    job = yield from end_job(work.job, wait, on_progress)
    if job is None or job.status not in FINISHED:
        return msgspec.structs.replace(work, job=job)
    counts = job.counts
    return msgspec.structs.replace(
        work, job=job, bytes_before=counts.bytes_before, bytes_after=counts.bytes_after
    )


def _change(call: Call[ChangeWork], wait: bool | float, on_progress: OnProgress | None) -> Plan[ChangeWork]:
    work: ChangeWork = yield call
    job = yield from end_job(work.job, wait, on_progress)
    return msgspec.structs.replace(work, job=job, change=(job and job.change) or work.change)
