"""What a memory can do without a model: list, delete, keep the store. Neither torch nor transformers here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from memkv.config import Config
from memkv.errors import BadRequestError, CollectionNotFound, ConflictError
from memkv.kv.fingerprint import Fingerprint
from memkv.memory.access_keys import AccessKeys
from memkv.memory.administration import Administration
from memkv.memory.clearance import Clearance
from memkv.memory.maintenance import Abilities, Maintenance
from memkv.memory.metrics import Metric, store_metrics
from memkv.memory.replies import (
    collection_reply,
    document_reply,
    job_reply,
    page_reply,
    page_rows,
    stats_reply,
)
from memkv.memory.transfer import Tell, export_collections, plan_export
from memkv.memory.valid_request import require_valid
from memkv.store import Store
from memkv.store.archives import Archives
from memkv.store.catalog_keys import KeyStatements
from memkv.store.database import Database, parse_database_url
from memkv.store.filters import parse_filter
from memkv.store.jobs import job_not_found
from memkv.store.quota import Caps
from memkv.store.restored_keys import kept_keys_path
from memkv.store.rows import DEFAULT_TENANT, CollectionRow, JobRow, KVFileRow
from memkv.store.schema import schema_revision
from memkv.store.verification import Recomputed
from memkv.wire import (
    Collection,
    CollectionPatch,
    Document,
    DocumentStatus,
    Exported,
    Filter,
    Job,
    JobStatus,
    Page,
    PageRequest,
    StoreExport,
    StoreStats,
    StoreVerification,
    StoreVerify,
)


class StoredMemory:
    """Opens the store and no model. `Memory` is this and everything that needs one.

    Attributes:
        admin: what an operator does to the store.
        keys: who may ask a server of it for what. In this process nobody is asked for one.
    """

    def __init__(self, config: Config, store: Store) -> None:
        self._config = config
        self._store = store
        self._archives = Archives(Path(config.store.data_dir).absolute())
        self._maintenance = Maintenance(store, config.store, self._abilities())
        self._clearance = Clearance(store, self._drop)
        self.admin = Administration(store, self._archives)
        self.keys = AccessKeys(store.catalog)

    @classmethod
    def open_store(cls, config: Config) -> StoredMemory:
        """Raises what `Store.open` raises."""
        memory = StoredMemory(config, open_store(config))
        memory._maintenance.start()
        memory._clearance.start()
        return memory

    def close(self, drain_seconds: float = 0.0) -> None:
        try:
            self._maintenance.stop()
            self._clearance.stop()
        finally:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Collections

    def list_collections(
        self, page: PageRequest, *, within: frozenset[str] | None = None, tenant: str = DEFAULT_TENANT
    ) -> Page[Collection]:
        """`within`: only those of these names."""
        require_valid(page)
        found = self._store.catalog.list_collections(tenant, page_rows(page), within=within)
        return page_reply(found, self._collection_reply, lambda reply: reply.id)

    def get_collection(self, name: str, *, tenant: str = DEFAULT_TENANT) -> Collection:
        return self._collection_reply(self._store.catalog.get_collection(tenant, name))

    def update_collection(
        self, name: str, patch: CollectionPatch, *, tenant: str = DEFAULT_TENANT
    ) -> Collection:
        """Raises `CollectionNotFound`."""
        require_valid(patch)
        row = self._store.catalog.update_collection(
            tenant,
            name,
            description=patch.description,
            prefill=patch.prefill,
            max_kv_bytes=patch.max_kv_bytes,
        )
        self._forget_collection(row.id)
        return self._collection_reply(row)

    def delete_collection(self, name: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """Gone for queries that start after it returns; running ones end on what they hold."""
        deleted = self._store.delete_collection(tenant, name)
        self._forget_collection(deleted.collection_id)
        self._drop(deleted.released.keys)

    # Documents

    def list_documents(
        self,
        collection: str,
        page: PageRequest,
        *,
        status: str = "",
        filter: Filter | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> Page[Document]:
        require_valid(page)
        wanted = _one_of(DocumentStatus, status)
        row = self._store.catalog.get_collection(tenant, collection)
        found = self._store.catalog.list_documents(
            tenant,
            row.id,
            page_rows(page),
            status=wanted,
            matching=parse_filter(filter),
        )
        return page_reply(found, lambda document: document_reply(document, row.name), lambda reply: reply.id)

    def get_document(self, collection: str, document: str, *, tenant: str = DEFAULT_TENANT) -> Document:
        """By id or external id."""
        row = self._store.catalog.get_collection(tenant, collection)
        return document_reply(self._store.catalog.get_document(tenant, row.id, document), row.name)

    def forget(self, collection: str, document: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """Deletes a document by id or external id: no query that starts after this sees it."""
        row = self._store.catalog.get_collection(tenant, collection)
        change = self._store.delete_document(tenant, row.id, document)
        self._drop(change.released.keys)

    # Jobs

    def list_jobs(
        self,
        page: PageRequest,
        *,
        kind: str = "",
        status: str = "",
        collection: str = "",
        within: frozenset[str] | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> Page[Job]:
        """`within`: only jobs of the collections of these names."""
        require_valid(page)
        wanted = _one_of(JobStatus, status)
        collection_id = self._store.catalog.get_collection(tenant, collection).id if collection else None
        found = self._store.jobs.list(
            tenant,
            page_rows(page),
            kind=kind or None,
            status=wanted,
            collection_id=collection_id,
            within=within,
        )
        return page_reply(found, self._job_reply, lambda reply: reply.id)

    def get_job(
        self, job_id: str, *, within: frozenset[str] | None = None, tenant: str = DEFAULT_TENANT
    ) -> Job:
        """Raises `JobNotFound`, also for a job of no collection of the names `within`."""
        job = self._job_reply(self._store.jobs.get(tenant, job_id))
        if within is not None and job.collection not in within:
            raise job_not_found(job_id)
        return job

    def wait_job(
        self,
        job_id: str,
        timeout: float | None,
        on_progress: Callable[[Job], None] | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
    ) -> Job:
        """The job when it is finished, or as it stands after `timeout` seconds."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            job = self._store.jobs.wait(tenant, job_id, max(0.0, min(left, 0.25)))
            reply = self._job_reply(job)
            if on_progress is not None:
                on_progress(reply)
            if job.is_finished or left <= 0:
                return reply

    def cancel_job(self, job_id: str, *, tenant: str = DEFAULT_TENANT) -> Job:
        """Ends a queued job at once, and a running one as soon as what it has in hand is done.

        What it did stays. Raises `JobNotFound`, `ConflictError` where it has ended already.
        """
        return self._job_reply(self._store.jobs.cancel(tenant, job_id))

    def retry_job(self, job_id: str, *, tenant: str = DEFAULT_TENANT) -> Job:
        """Queues a job again that did not succeed, for what it left undone.

        Raises `JobNotFound`, `ConflictError` where nothing of it is to be tried again.
        """
        return self._job_reply(self._store.jobs.retry(tenant, job_id))

    # Store

    def verify_store(
        self, full: bool = True, on_progress: Callable[[int, int], None] | None = None
    ) -> StoreVerification:
        """Compares database and files in the caller's thread; `full` reads every byte. Mends nothing."""
        return self._maintenance.verify(StoreVerify(full=full), on_progress or (lambda done, total: None))

    def export(
        self,
        path: Path,
        collections: Sequence[str] = (),
        *,
        with_kv: bool = False,
        dry_run: bool = False,
        on_progress: Tell | None = None,
    ) -> Exported:
        """Writes collections, or all, to a new archive. Raises `CollectionNotFound`, `ConfigError`."""
        if dry_run:
            return plan_export(self._store, path, collections, with_kv=with_kv)
        tell = on_progress or (lambda name, done, total: None)
        return export_collections(self._store, path, collections, with_kv=with_kv, tell=tell)

    def store_stats(self) -> StoreStats:
        return stats_reply(self._store.stats(), self._pool(), self._stale())

    def metrics(self) -> list[Metric]:
        """Every number there is. Raises `DatabaseUnavailable`, `DatabaseDamaged`."""
        return list(
            store_metrics(self._store, self._archives, self._config.store, self._maintenance.scrubbed)
        )

    # What a model adds

    def _abilities(self) -> Abilities:
        return Abilities(
            recompute=self._recompute,
            resume_starved=self._resume_starved,
            preload=self._preload,
            export=self._export,
        )

    def _export(self, request: StoreExport, tell: Tell) -> Exported:
        """To a name in the data directory's archives/."""
        path = self._archives.for_writing(request.archive)
        return export_collections(self._store, path, request.collections, with_kv=request.kv, tell=tell)

    def _drop(self, input_keys: Iterable[str]) -> None:
        """Lets a pool forget these."""

    def _forget_collection(self, collection_id: str) -> None:
        """The collection is not there any more, or not as it was."""

    def _pool(self) -> dict[str, int]:
        return {}

    def _stale(self) -> list[str] | None:
        return None

    def _resume_starved(self) -> None:
        """Queues documents again that failed for want of room, as far as there is room now."""

    def _preload(self, files: Sequence[KVFileRow], on_progress: Callable[[int, int], None]) -> None:
        """Loads chunks into the engine's memory, where there is one."""

    def _recompute(
        self, count: int, repair: bool, deadline: float, on_progress: Callable[[int, int], None]
    ) -> Recomputed:
        raise ConflictError(
            "chunks cannot be prefilled again without a model", hint="leave out --deep, or name the model"
        )

    def _collection_reply(self, row: CollectionRow) -> Collection:
        counts = self._store.catalog.count_collection(row.tenant, row.id)
        return collection_reply(row, counts, model_name(row))

    def _job_reply(self, row: JobRow) -> Job:
        try:
            collection = self._store.catalog.collection_by_id(row.tenant, row.collection_id).name
        except CollectionNotFound:  # deleted since, or the job is about the whole store
            collection = ""
        return job_reply(row, collection, self._store.jobs.items(row.tenant, row.id))


def open_store(config: Config) -> Store:
    """The store that a configuration names. Raises what `Store.open` raises."""
    return Store.open(
        Path(config.store.data_dir),
        config.store.database_url or None,
        busy_seconds=config.store.busy_seconds,
        caps=Caps(config.store.max_kv_bytes, config.store.max_tenant_kv_bytes),
    )


@contextmanager
def open_keys(config: Config) -> Iterator[AccessKeys]:
    """The keys of a store, which a server may have open meanwhile; the store is made where there is none.

    Raises what `Store.open` raises.
    """
    with _beside(config) as keys:
        if keys is not None:
            yield keys
            return
    with open_store(config) as store:
        yield AccessKeys(store.catalog)


def wants_keys(config: Config) -> bool:
    """Whether a server of this store will ask for keys: it has some."""
    with _beside(config) as keys:
        if keys is not None:
            return keys.exist()
    return kept_keys_path(Path(config.store.data_dir)).exists()


@contextmanager
def _beside(config: Config) -> Iterator[AccessKeys | None]:
    """The keys, without the store's lock; None where the store is to be made, upgraded or opened first."""
    url = parse_database_url(config.store.database_url or None, Path(config.store.data_dir).absolute())
    absent = url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file()
    if absent or kept_keys_path(Path(config.store.data_dir)).exists():
        yield None
        return
    with closing(Database(url, busy_seconds=config.store.busy_seconds)) as database:
        usable = schema_revision(database).is_current and database.allows_other_writers
        yield AccessKeys(KeyStatements(database)) if usable else None


def model_name(row: CollectionRow) -> str:
    """What to call the model that made a collection; collections of older memkvs know its digest alone."""
    return row.model_name or f"weights {Fingerprint.from_json(row.fingerprint_json).weights_digest[:12]}"


def _one_of(choices: Any, word: str) -> Any:
    """`word` as one of a Literal's choices; None for an empty one. Raises `BadRequestError`."""
    possible = get_args(choices)
    if word and word not in possible:
        raise BadRequestError(f"status {word!r} is not known", hint=", ".join(possible))
    return word or None
