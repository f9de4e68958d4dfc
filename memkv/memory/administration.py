"""What an operator asks of a store, in the words of the wire. No model is needed for any of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict

import msgspec

from memkv.memory.replies import (
    change_reply,
    file_reply,
    job_reply,
    page_reply,
    page_rows,
    quarantine_reply,
    reference_reply,
)
from memkv.store import Store
from memkv.store.block_file import file_name
from memkv.store.rows import DEFAULT_TENANT, CollectionRow
from memkv.wire import (
    Page,
    PageRequest,
    Quarantine,
    Snapshot,
    SnapshotCreate,
    SnapshotList,
    StoreChange,
    StoreCollection,
    StoreCompact,
    StoreEvict,
    StoreFile,
    StoreFileDetail,
    StoreGC,
    StoreProblem,
    StorePurge,
    StoreVerify,
    StoreWork,
)


class Administration:
    """Thread-safe.

    Args:
        drop: lets an engine's pool forget keys whose files were removed.
    """

    def __init__(self, store: Store, drop: Callable[[Iterable[str]], None]) -> None:
        self._store = store
        self._drop = drop

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

    def purge(self, request: StorePurge) -> StoreChange:
        """Removes what was set aside."""
        return change_reply(
            self._store.upkeep.purge_quarantine(dry_run=request.dry_run), dry_run=request.dry_run
        )

    def gc(self, request: StoreGC) -> StoreChange:
        """Removes what nothing refers to. Raises `ConflictError` where that is most of the store."""
        removed = self._store.upkeep.collect_garbage(dry_run=request.dry_run, force=request.force)
        self._drop(removed.released)
        return change_reply(removed, dry_run=request.dry_run)

    def evict(self, request: StoreEvict) -> StoreChange:
        """Removes KV, what was used longest ago first. Raises `CollectionNotFound`."""
        collection = self._collection(request.collection) if request.collection else None
        removed = self._store.upkeep.evict(collection, to_bytes=request.to_bytes, dry_run=request.dry_run)
        return change_reply(removed, dry_run=request.dry_run)

    def compact(self, request: StoreCompact) -> StoreChange:
        """Gives the space of deleted rows back to the disk of the database."""
        return change_reply(self._store.upkeep.compact(dry_run=request.dry_run), dry_run=request.dry_run)

    def verify(self, request: StoreVerify) -> StoreWork:
        """Queues a check of the database, of every block file and of every index."""
        files, size = self._store.catalog.kv_totals()
        arguments = msgspec.to_builtins(request)
        return self._queue("verify", "", arguments, request.dry_run, (files, 0, size))

    def warm(self, request: StoreCollection) -> StoreWork:
        """Queues reading a collection's files and loading what the engine's memory has room for.

        Raises `CollectionNotFound`.
        """
        row = self._collection(request.collection)
        files = self._store.catalog.files_of(row.id)
        cost = (len(files), sum(file.num_tokens for file in files), sum(file.num_bytes for file in files))
        return self._queue("warm", row.id, None, request.dry_run, cost)

    def create_snapshot(self, request: SnapshotCreate) -> Snapshot:
        """Keeps the store as it is now. Raises what `Snapshots.create` does."""
        snapshots = self._store.snapshots
        return Snapshot(**asdict(snapshots.plan() if request.dry_run else snapshots.create()))

    def snapshots(self) -> SnapshotList:
        """What was kept, the oldest first."""
        return SnapshotList(data=[Snapshot(**asdict(found)) for found in self._store.snapshots.list()])

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Raises `NotFoundError`."""
        self._store.snapshots.delete(snapshot_id)

    def _queue(
        self,
        kind: str,
        collection_id: str,
        arguments: dict[str, object] | None,
        dry_run: bool,
        cost: tuple[int, int, int],
    ) -> StoreWork:
        files, tokens, size = cost
        job = None
        if not dry_run:
            row = self._store.jobs.create(
                DEFAULT_TENANT, collection_id, kind, (), unit="files", arguments=arguments
            )
            job = job_reply(row, "", ())
        return StoreWork(dry_run=dry_run, files=files, tokens=tokens, bytes=size, job=job)

    def _collection(self, name: str) -> CollectionRow:
        return self._store.catalog.get_collection(DEFAULT_TENANT, name)
