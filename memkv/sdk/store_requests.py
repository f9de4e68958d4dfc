"""Requests about the store, without IO, in the form of `requests.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memkv.errors import ConflictError
from memkv.sdk.call import Call, Listing, page_params, segment
from memkv.sdk.requests import Order
from memkv.wire import (
    ArchiveList,
    ArchiveWork,
    ChangeWork,
    Page,
    PageRequest,
    Quarantine,
    Request,
    SnapshotCreate,
    SnapshotList,
    SnapshotRestore,
    SnapshotWork,
    StoreCollection,
    StoreCompact,
    StoreEvict,
    StoreExport,
    StoreFile,
    StoreFileDetail,
    StoreGC,
    StoreImport,
    StorePurge,
    StoreStats,
    StoreVerify,
    StoreWork,
)

if TYPE_CHECKING:
    from memkv.memory import Memory


def store_stats() -> Call[StoreStats]:
    """Bytes, files and blocks of the store."""
    return Call(
        method="GET", path="/v1/store/stats", reply=StoreStats, local=lambda memory: memory.store_stats()
    )


def list_files(
    *,
    collection: str = "",
    unused: bool = False,
    limit: int = 20,
    order: Order = "asc",
    after: str = "",
    before: str = "",
) -> Listing[StoreFile]:
    """Block files in order of their keys: of one collection, or only those that nothing refers to."""

    def call_for(page: PageRequest) -> Call[Page[StoreFile]]:
        more = {"collection": collection, "unused": "true" if unused else ""}
        return Call(
            method="GET",
            path="/v1/store/files",
            params=page_params(page, **more),
            reply=Page[StoreFile],
            local=lambda memory: memory.admin.files(page, collection=collection, unused=unused),
        )

    return Listing(PageRequest(limit=limit, order=order, after=after, before=before), call_for)


def get_file(key: str) -> Call[StoreFileDetail]:
    """One file by its key or the first digits: what refers to it, and whether its bytes are right."""
    return Call(
        method="GET",
        path=f"/v1/store/files/{segment(key)}",
        reply=StoreFileDetail,
        local=lambda memory: memory.admin.file(key),
    )


def quarantine() -> Call[Quarantine]:
    """What was set aside, and why."""
    return Call(
        method="GET",
        path="/v1/store/quarantine",
        reply=Quarantine,
        local=lambda memory: memory.admin.quarantine(),
    )


def list_snapshots() -> Call[SnapshotList]:
    """What was kept, the oldest first."""
    return Call(
        method="GET",
        path="/v1/store/snapshots",
        reply=SnapshotList,
        local=lambda memory: memory.admin.snapshots(),
    )


def delete_snapshot(snapshot_id: str) -> Call[None]:
    """Raises `NotFoundError`."""
    return Call(
        method="DELETE",
        path=f"/v1/store/snapshots/{segment(snapshot_id)}",
        reply=None,
        local=lambda memory: memory.admin.delete_snapshot(snapshot_id),
        repeatable=False,
    )


def check_snapshot(snapshot_id: str) -> Call[SnapshotWork]:
    """Whether the store could be brought back to it."""
    return _restore(snapshot_id, SnapshotRestore(dry_run=True))


def start_restore(snapshot_id: str) -> Call[SnapshotWork]:
    return _restore(snapshot_id, SnapshotRestore())


def list_archives() -> Call[ArchiveList]:
    """The archives in `archives/` of the data directory, in order of their names."""
    return Call(
        method="GET",
        path="/v1/store/archives",
        reply=ArchiveList,
        local=lambda memory: memory.admin.archives(),
    )


def delete_archive(archive: str) -> Call[None]:
    """Raises `NotFoundError`."""
    return Call(
        method="DELETE",
        path=f"/v1/store/archives/{segment(archive)}",
        reply=None,
        local=lambda memory: memory.admin.delete_archive(archive),
        repeatable=False,
    )


def start_export(wanted: StoreExport) -> Call[ArchiveWork]:
    return _archive("/v1/store/export", wanted, lambda memory: memory.admin.export(wanted))


def start_import(wanted: StoreImport) -> Call[ArchiveWork]:
    return _archive("/v1/store/import", wanted, lambda memory: memory.admin.import_(wanted))


def start_gc(wanted: StoreGC) -> Call[ChangeWork]:
    return _change("/v1/store/gc", wanted, lambda memory: memory.admin.gc(wanted))


def start_evict(wanted: StoreEvict) -> Call[ChangeWork]:
    return _change("/v1/store/evict", wanted, lambda memory: memory.admin.evict(wanted))


def start_compact(wanted: StoreCompact) -> Call[ChangeWork]:
    return _change("/v1/store/compact", wanted, lambda memory: memory.admin.compact(wanted))


def start_purge(wanted: StorePurge) -> Call[ChangeWork]:
    return _change("/v1/store/quarantine/purge", wanted, lambda memory: memory.admin.purge(wanted))


def start_snapshot(wanted: SnapshotCreate) -> Call[SnapshotWork]:
    return Call(
        method="POST",
        path="/v1/store/snapshots",
        reply=SnapshotWork,
        body=wanted,
        local=lambda memory: memory.admin.create_snapshot(wanted),
        repeatable=False,
    )


def start_verify(wanted: StoreVerify) -> Call[StoreWork]:
    return _work("/v1/store/verify", wanted, lambda memory: memory.admin.verify(wanted))


def start_warm(wanted: StoreCollection) -> Call[StoreWork]:
    return _work("/v1/store/warm", wanted, lambda memory: memory.admin.warm(wanted))


def start_reprefill(wanted: StoreCollection) -> Call[StoreWork]:
    return _work("/v1/store/reprefill", wanted, lambda memory: memory.reprefill(wanted))


def _change(path: str, wanted: Request, local: Callable[[Memory], ChangeWork]) -> Call[ChangeWork]:
    return Call(method="POST", path=path, reply=ChangeWork, body=wanted, local=local, repeatable=False)


def _restore(snapshot_id: str, wanted: SnapshotRestore) -> Call[SnapshotWork]:
    def in_this_process(memory: Memory) -> SnapshotWork:
        if wanted.dry_run:
            return SnapshotWork(dry_run=True, snapshot=memory.admin.check_snapshot(snapshot_id))
        raise ConflictError(
            "this process has the store open, and a snapshot is restored where nobody has",
            hint="close it, then: memkv store snapshot restore SNAPSHOT",
        )

    return Call(
        method="POST",
        path=f"/v1/store/snapshots/{segment(snapshot_id)}/restore",
        reply=SnapshotWork,
        body=wanted,
        local=in_this_process,
        repeatable=False,
    )


def _archive(path: str, wanted: Request, local: Callable[[Memory], ArchiveWork]) -> Call[ArchiveWork]:
    return Call(method="POST", path=path, reply=ArchiveWork, body=wanted, local=local, repeatable=False)


def _work(path: str, wanted: Request, local: Callable[[Memory], StoreWork]) -> Call[StoreWork]:
    return Call(method="POST", path=path, reply=StoreWork, body=wanted, local=local, repeatable=False)
