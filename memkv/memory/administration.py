"""What an operator asks of a store, in the words of the wire. No model is needed for any of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec

from memkv.errors import BadRequestError
from memkv.memory.replies import (
    change_reply,
    file_reply,
    job_reply,
    page_reply,
    page_rows,
    quarantine_reply,
    reference_reply,
)
from memkv.memory.transfer import plan_export
from memkv.store import Store
from memkv.store.archives import Archives
from memkv.store.block_file import file_name
from memkv.store.catalog_jobs import SNAPSHOT
from memkv.store.catalog_restores import begin_restore
from memkv.store.ids import new_id
from memkv.store.rows import DEFAULT_TENANT, CollectionRow, JobRow
from memkv.store.snapshots import check_snapshot
from memkv.store.upkeep import Removed
from memkv.wire import (
    ArchiveFile,
    ArchiveList,
    ArchiveWork,
    ChangeWork,
    Job,
    Page,
    PageRequest,
    Quarantine,
    Snapshot,
    SnapshotCreate,
    SnapshotList,
    SnapshotWork,
    StoreCollection,
    StoreCompact,
    StoreEvict,
    StoreExport,
    StoreFile,
    StoreFileDetail,
    StoreGC,
    StoreImport,
    StoreProblem,
    StorePurge,
    StoreVerify,
    StoreWork,
)


@dataclass(frozen=True, slots=True)
class Restoration:
    """A snapshot that is to be restored as soon as the memory is closed.

    Attributes:
        reply: for who asked for it.
    """

    job: JobRow
    reply: SnapshotWork


class Administration:
    """Thread-safe.

    Args:
        archives: what may be exported to and imported from by name.
    """

    def __init__(self, store: Store, archives: Archives) -> None:
        self._store = store
        self._archives = archives

    def files(self, page: PageRequest, *, collection: str = "", unused: bool = False) -> Page[StoreFile]:
        """Block files in order of their keys. Raises `CollectionNotFound`."""
        collection_id = self._collection(collection).id if collection else None
        found = self._store.catalog.list_files(page_rows(page), collection_id=collection_id, unused=unused)
        return page_reply(found, file_reply, lambda file: file.key)

    def file(self, key: str) -> StoreFileDetail:
        """One file, every byte of it read; by its key or the first digits. Raises `NotFoundError`."""
        catalog = self._store.catalog
        state = catalog.find_file(key)
        row = state.file
        name = file_name(row.input_key, row.file_digest)
        damage = self._store.chunks.check(row, full=True)
        return StoreFileDetail(
            file=file_reply(state),
            name=name,
            fingerprint=row.fingerprint_digest,
            references=[reference_reply(found) for found in catalog.references(row.tenant, row.input_key)],
            damage=None
            if damage is None
            else StoreProblem(kind=damage.kind, name=name, detail=damage.detail),
        )

    def quarantine(self) -> Quarantine:
        """What was set aside, and why."""
        return quarantine_reply(self._store.upkeep.quarantined())

    def purge(self, request: StorePurge) -> ChangeWork:
        """Queues removing what was set aside."""
        return self._change("purge", request, self._store.upkeep.purge_quarantine(dry_run=True))

    def gc(self, request: StoreGC) -> ChangeWork:
        """Queues removing what nothing refers to. Raises `ConflictError` where that is most of the store."""
        if not request.dry_run and not request.force:
            self._store.upkeep.require_little_garbage()
        return self._change("gc", request, self._store.upkeep.collect_garbage(dry_run=True))

    def evict(self, request: StoreEvict) -> ChangeWork:
        """Queues removing KV, what was used longest ago first. Raises `CollectionNotFound`."""
        collection = self._collection(request.collection) if request.collection else None
        plan = self._store.upkeep.evict(collection, to_bytes=request.to_bytes, dry_run=True)
        return self._change("evict", request, plan, collection.id if collection else "")

    def compact(self, request: StoreCompact) -> ChangeWork:
        """Queues giving the space of deleted rows back to the disk of the database."""
        return self._change("compact", request, self._store.upkeep.compact(dry_run=True))

    def verify(self, request: StoreVerify) -> StoreWork:
        """Queues a check of the database, of every block file and of every index.

        Raises `BadRequestError` for a bound on a check that reads no bytes.
        """
        if request.max_seconds and not request.full:
            raise BadRequestError(
                "max_seconds bounds the reading of bytes, and a quick check reads none",
                hint="leave one of them out",
            )
        files, size = self._store.catalog.kv_totals()
        before = self._store.upkeep.disk_bytes()
        after = before - (self._store.upkeep.unneeded_bytes() if request.repair else 0)
        plan = StoreWork(
            dry_run=request.dry_run,
            files=files,
            tokens=0,
            bytes=size,
            bytes_before=before,
            bytes_after=after,
        )
        return self._queue("verify", "", msgspec.to_builtins(request), plan)

    def warm(self, request: StoreCollection) -> StoreWork:
        """Queues reading a collection's files and loading what the engine's memory has room for.

        Raises `CollectionNotFound`.
        """
        row = self._collection(request.collection)
        files = self._store.catalog.files_of(row.id)
        before = self._store.upkeep.disk_bytes()
        plan = StoreWork(
            dry_run=request.dry_run,
            files=len(files),
            tokens=sum(file.num_tokens for file in files),
            bytes=sum(file.num_bytes for file in files),
            bytes_before=before,
            bytes_after=before,
        )
        return self._queue("warm", row.id, {}, plan)

    def export(self, request: StoreExport) -> ArchiveWork:
        """Queues writing collections, or all, to a new archive.

        Raises `ConflictError` where it exists, `CollectionNotFound`.
        """
        path = self._archives.vacant(request.archive)
        plan = plan_export(self._store, path, request.collections, with_kv=request.kv)
        job = (
            None if request.dry_run else self._create_job("export", "documents", msgspec.to_builtins(request))
        )
        return ArchiveWork(dry_run=request.dry_run, job=job, exported=plan)

    def import_(self, request: StoreImport) -> ArchiveWork:
        """Queues ingesting an archive; with `dry_run`, checking it. Raises `NotFoundError`."""
        self._archives.existing(request.archive)
        job = self._create_job("import", "documents", msgspec.to_builtins(request))
        return ArchiveWork(dry_run=request.dry_run, job=job)

    def archives(self) -> ArchiveList:
        """In order of their names."""
        return ArchiveList(data=[ArchiveFile(**asdict(file)) for file in self._archives.list()])

    def delete_archive(self, name: str) -> None:
        """Raises `NotFoundError`."""
        self._archives.delete(name)

    def create_snapshot(self, request: SnapshotCreate) -> SnapshotWork:
        """Queues keeping the store as it is when the job runs."""
        plan = Snapshot(**asdict(self._store.snapshots.plan()))
        if request.dry_run:
            return SnapshotWork(dry_run=True, snapshot=plan)
        # Its id is known before it is made: after a kill the job sees whether it was.
        job = self._create_job(SNAPSHOT, "files", {"snapshot": new_id("snp")})
        return SnapshotWork(dry_run=False, snapshot=plan, job=job)

    def snapshots(self) -> SnapshotList:
        """What was kept, the oldest first."""
        return SnapshotList(data=[Snapshot(**asdict(found)) for found in self._store.snapshots.list()])

    def check_snapshot(self, snapshot_id: str) -> Snapshot:
        """One that this store can be brought back to. Raises `NotFoundError`, `ConfigError`."""
        store = self._store
        return Snapshot(**asdict(check_snapshot(store.data_dir, store.database.dialect, snapshot_id)))

    def begin_restore(self, snapshot_id: str) -> Restoration:
        """Writes down that the store is to be brought back to a snapshot, once it is closed.

        Raises `NotFoundError`, `ConfigError`; `ConflictError` where another is to be restored.
        """
        snapshot = self.check_snapshot(snapshot_id)
        row = begin_restore(self._store.database, DEFAULT_TENANT, snapshot_id, f"pid {os.getpid()}")
        work = SnapshotWork(dry_run=False, snapshot=snapshot, job=job_reply(row, "", ()))
        return Restoration(row, work)

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Raises `NotFoundError`."""
        self._store.snapshots.delete(snapshot_id)

    def _change(
        self,
        kind: str,
        request: StoreGC | StoreEvict | StoreCompact | StorePurge,
        plan: Removed,
        collection_id: str = "",
    ) -> ChangeWork:
        """The job finds room for itself on a full disk: it is there to make some."""
        job = None
        if not request.dry_run:
            job = self._store.reserve.spend_on(
                lambda: self._create_job(kind, "files", msgspec.to_builtins(request), collection_id)
            )
        return ChangeWork(dry_run=request.dry_run, change=change_reply(plan, dry_run=True), job=job)

    def _queue(
        self, kind: str, collection_id: str, arguments: Mapping[str, object], plan: StoreWork
    ) -> StoreWork:
        if plan.dry_run:
            return plan
        job = self._create_job(kind, "files", arguments, collection_id)
        return msgspec.structs.replace(plan, job=job)

    def _create_job(
        self, kind: str, unit: str, arguments: Mapping[str, object], collection_id: str = ""
    ) -> Job:
        jobs = self._store.jobs
        row = jobs.create(DEFAULT_TENANT, collection_id, kind, (), unit=unit, arguments=arguments)
        return job_reply(row, "", ())

    def _collection(self, name: str) -> CollectionRow:
        return self._store.catalog.get_collection(DEFAULT_TENANT, name)
