"""`/v1/store`: what lies on disk, and what an operator does to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from litestar import Controller, Request, Response, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody
from memkv.api.access import requires
from memkv.api.errors import problems
from memkv.api.memory_calls import MemoryCalls
from memkv.api.params import (
    After,
    ArchivePath,
    Before,
    FileKey,
    FilesOfCollection,
    Limit,
    Order,
    SnapshotId,
    UnusedOnly,
    Wait,
    finite,
    page_request,
)
from memkv.api.waiting import is_finished, requested_wait, wait_for_job

from memkv.errors import ConflictError
from memkv.wire import (
    ArchiveList,
    ArchiveWork,
    ChangeWork,
    Page,
    Quarantine,
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

_CHANGES = problems(404, 409, 413, 415, 507)
W = TypeVar("W", StoreWork, ChangeWork, ArchiveWork, SnapshotWork)


def _works(reply: type[W]) -> dict[int, ResponseSpec]:
    """What a route answers that starts a job, besides its 200."""
    accepted = ResponseSpec(
        data_container=reply, description="The job at `Location` does it", generate_examples=False
    )
    return {202: accepted, **_CHANGES}


_DONE = "Done within `wait`, nothing to do, or only told: `dry_run`"


def _patience(request: Request[Any, Any, Any], wait: Wait = None) -> float:
    """Seconds that the client waits for a job."""
    return requested_wait(request, finite(wait))


Patience = NamedDependency[float]


class StoreController(Controller):
    path = "/v1/store"
    tags = ("store",)
    opt = requires("admin")
    dependencies = {"patience": Provide(_patience, sync_to_thread=False)}  # noqa: RUF012

    @get("/stats", summary="Bytes, files and blocks", operation_id="store_stats", responses=problems())
    async def stats(self, calls: NamedDependency[MemoryCalls]) -> StoreStats:
        return await calls.run(lambda memory: memory.store_stats())

    @get("/files", summary="List block files", operation_id="list_store_files", responses=problems(404))
    async def list_files(
        self,
        calls: NamedDependency[MemoryCalls],
        limit: Limit = 20,
        order: Order = "asc",
        after: After = "",
        before: Before = "",
        collection: FilesOfCollection = None,
        unused: UnusedOnly = False,
    ) -> Page[StoreFile]:
        page = page_request(limit, order, after, before)
        return await calls.run(
            lambda memory: memory.admin.files(page, collection=collection or "", unused=unused)
        )

    @get(
        "/files/{key:str}",
        summary="One block file, every byte checked",
        operation_id="get_store_file",
        responses=problems(404),
    )
    async def get_file(self, key: FileKey, calls: NamedDependency[MemoryCalls]) -> StoreFileDetail:
        return await calls.run(lambda memory: memory.admin.file(key))

    @get(
        "/quarantine",
        summary="What was set aside, and why",
        operation_id="get_quarantine",
        responses=problems(),
    )
    async def quarantine(self, calls: NamedDependency[MemoryCalls]) -> Quarantine:
        return await calls.run(lambda memory: memory.admin.quarantine())

    @post(
        "/quarantine/purge",
        status_code=200,
        summary="Remove what was set aside",
        operation_id="purge_quarantine",
        response_description=_DONE,
        responses=_works(ChangeWork),
    )
    async def purge(
        self,
        data: JSONBody[StorePurge],
        calls: NamedDependency[MemoryCalls],
        patience: Patience,
    ) -> Response[ChangeWork]:
        return await _work(calls, patience, lambda memory: memory.admin.purge(data))

    @post(
        "/gc",
        status_code=200,
        summary="Remove what nothing refers to",
        operation_id="collect_garbage",
        response_description=_DONE,
        responses=_works(ChangeWork),
    )
    async def gc(
        self, data: JSONBody[StoreGC], calls: NamedDependency[MemoryCalls], patience: Patience
    ) -> Response[ChangeWork]:
        return await _work(calls, patience, lambda memory: memory.admin.gc(data))

    @post(
        "/evict",
        status_code=200,
        summary="Remove KV, what was used longest ago first",
        operation_id="evict",
        response_description=_DONE,
        responses=_works(ChangeWork),
    )
    async def evict(
        self,
        data: JSONBody[StoreEvict],
        calls: NamedDependency[MemoryCalls],
        patience: Patience,
    ) -> Response[ChangeWork]:
        return await _work(calls, patience, lambda memory: memory.admin.evict(data))

    @post(
        "/compact",
        status_code=200,
        summary="Give the database's unused space back to its disk",
        operation_id="compact",
        response_description=_DONE,
        responses=_works(ChangeWork),
    )
    async def compact(
        self,
        data: JSONBody[StoreCompact],
        calls: NamedDependency[MemoryCalls],
        patience: Patience,
    ) -> Response[ChangeWork]:
        return await _work(calls, patience, lambda memory: memory.admin.compact(data))

    @post(
        "/verify",
        status_code=200,
        summary="Check the database, every block file and every index",
        operation_id="verify_store",
        response_description=_DONE,
        responses=_works(StoreWork),
    )
    async def verify(
        self,
        data: JSONBody[StoreVerify],
        calls: NamedDependency[MemoryCalls],
        patience: Patience,
    ) -> Response[StoreWork]:
        return await _work(calls, patience, lambda memory: memory.admin.verify(data))

    @post(
        "/warm",
        status_code=200,
        summary="Read a collection's files, and load of its chunks what the engine's memory has room for",
        operation_id="warm",
        response_description=_DONE,
        responses=_works(StoreWork),
    )
    async def warm(
        self,
        data: JSONBody[StoreCollection],
        calls: NamedDependency[MemoryCalls],
        patience: Patience,
    ) -> Response[StoreWork]:
        return await _work(calls, patience, lambda memory: memory.admin.warm(data))

    @post(
        "/reprefill",
        status_code=200,
        summary="Make the KV that a collection lacks; of a stale one, everything",
        operation_id="reprefill",
        response_description=_DONE,
        responses=_works(StoreWork),
    )
    async def reprefill(
        self,
        data: JSONBody[StoreCollection],
        calls: NamedDependency[MemoryCalls],
        patience: Patience,
    ) -> Response[StoreWork]:
        return await _work(calls, patience, lambda memory: memory.reprefill(data))

    @post(
        "/export",
        status_code=200,
        summary="Write collections to a new archive in `archives/` of the data directory",
        operation_id="export_collections",
        response_description=_DONE,
        responses=_works(ArchiveWork),
    )
    async def export(
        self,
        data: JSONBody[StoreExport],
        calls: NamedDependency[MemoryCalls],
        patience: Patience,
    ) -> Response[ArchiveWork]:
        return await _work(calls, patience, lambda memory: memory.admin.export(data))

    @post(
        "/import",
        status_code=200,
        summary="Ingest an archive from `archives/` of the data directory",
        description="With `dry_run` the job only looks.",
        operation_id="import_collections",
        response_description="Done within `wait`",
        responses=_works(ArchiveWork),
    )
    async def import_(
        self,
        data: JSONBody[StoreImport],
        calls: NamedDependency[MemoryCalls],
        patience: Patience,
    ) -> Response[ArchiveWork]:
        return await _work(calls, patience, lambda memory: memory.admin.import_(data))

    @get("/archives", summary="List archives", operation_id="list_archives", responses=problems())
    async def archives(self, calls: NamedDependency[MemoryCalls]) -> ArchiveList:
        return await calls.run(lambda memory: memory.admin.archives())

    @delete(
        "/archives/{archive:str}",
        summary="Delete an archive",
        operation_id="delete_archive",
        responses=problems(404),
    )
    async def delete_archive(self, archive: ArchivePath, calls: NamedDependency[MemoryCalls]) -> None:
        await calls.run(lambda memory: memory.admin.delete_archive(archive))

    @get("/snapshots", summary="List snapshots", operation_id="list_snapshots", responses=problems())
    async def snapshots(self, calls: NamedDependency[MemoryCalls]) -> SnapshotList:
        return await calls.run(lambda memory: memory.admin.snapshots())

    @post(
        "/snapshots",
        status_code=200,
        summary="Keep the store as it is",
        operation_id="create_snapshot",
        response_description=_DONE,
        responses=_works(SnapshotWork),
    )
    async def create_snapshot(
        self,
        data: JSONBody[SnapshotCreate],
        calls: NamedDependency[MemoryCalls],
        patience: Patience,
    ) -> Response[SnapshotWork]:
        return await _work(calls, patience, lambda memory: memory.admin.create_snapshot(data))

    @delete(
        "/snapshots/{snapshot_id:str}",
        summary="Delete a snapshot",
        operation_id="delete_snapshot",
        responses=problems(404),
    )
    async def delete_snapshot(self, snapshot_id: SnapshotId, calls: NamedDependency[MemoryCalls]) -> None:
        await calls.run(lambda memory: memory.admin.delete_snapshot(snapshot_id))

    @post(
        "/snapshots/{snapshot_id:str}/restore",
        status_code=200,
        summary="Bring the store back to a snapshot: what came after it is gone",
        description="Running requests end first; then the server restores, and serves again.",
        operation_id="restore_snapshot",
        response_description="Only told: `dry_run`",
        responses=_works(SnapshotWork),
    )
    async def restore_snapshot(
        self,
        snapshot_id: SnapshotId,
        data: JSONBody[SnapshotRestore],
        calls: NamedDependency[MemoryCalls],
    ) -> Response[SnapshotWork]:
        if data.dry_run:
            found = await calls.run(lambda memory: memory.admin.check_snapshot(snapshot_id))
            return Response(SnapshotWork(dry_run=True, snapshot=found), status_code=200)
        if not calls.drain.serves_again:
            raise ConflictError(
                "this server cannot restore: nobody would start it again",
                hint="stop it, then: memkv store snapshot restore SNAPSHOT",
            )
        restoration = await calls.run(lambda memory: memory.admin.begin_restore(snapshot_id))
        calls.drain.restore(restoration)
        return _accepted(restoration.reply)


async def _work(calls: MemoryCalls, patience: float, call: Callable[[Memory], W]) -> Response[W]:
    """The answer to a route that starts a job, once that has ended or after `patience` seconds."""
    work = await calls.run(call)
    if work.job is None:
        return Response(work, status_code=200)
    return _accepted(msgspec.structs.replace(work, job=await wait_for_job(calls, work.job, patience)))


def _accepted(work: W) -> Response[W]:
    assert work.job is not None, "bug: a reply without the job that it announces"
    status = 200 if is_finished(work.job) else 202
    return Response(work, status_code=status, headers={"Location": f"/v1/jobs/{work.job.id}"})
