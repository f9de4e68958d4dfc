"""`Memory`: what a server, an embedded client and the command line all call.

It speaks `memkv.wire`, is synchronous and may be called from any thread. Everything below it raises
`memkv.errors` only, and so does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import msgspec

import memkv
from memkv.config import Config
from memkv.engine.residency import BlockCounts
from memkv.engine.reuse import parse_policy, policy_names
from memkv.errors import CollectionExists, DocumentNotFound, MemKVError
from memkv.memory.answering import Answering, QueryStream
from memkv.memory.collections import Collections, require_same_settings
from memkv.memory.estimation import Estimation, TitledText
from memkv.memory.gate import cheapest_that_passed, named_policy
from memkv.memory.importing import import_archive
from memkv.memory.ingestion import Ingestion
from memkv.memory.maintenance import Abilities
from memkv.memory.metrics import Metric, engine_metrics, stale_metric
from memkv.memory.parts import Parts
from memkv.memory.preloading import preload_beside_questions
from memkv.memory.recomputation import recompute
from memkv.memory.renewal import reprefill, resume_starved
from memkv.memory.replies import accepted_reply
from memkv.memory.retrieval import Retrieval
from memkv.memory.stored import StoredMemory
from memkv.memory.transfer import Tell
from memkv.memory.valid_request import require_valid
from memkv.memory.warm_up import WarmUp
from memkv.store.rows import DEFAULT_TENANT, DocumentRow, KVFileRow, NewDocument
from memkv.store.verification import Recomputed
from memkv.text.reader import SourceText, accept_text, clean_question, read_text
from memkv.wire import (
    Accepted,
    Check,
    Collection,
    CollectionCreate,
    DocumentCreate,
    DocumentUpload,
    EmbedderInfo,
    Estimate,
    Imported,
    Info,
    Message,
    ModelInfo,
    QueryRequest,
    QueryResponse,
    Readiness,
    SearchRequest,
    SearchResponse,
    StoreCollection,
    StoreImport,
    StoreWork,
)


class Memory(StoredMemory):
    """Documents in, answers out. Open it with `Memory.open`; close it, or use it as a context manager."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.config, parts.store)
        self._parts = parts
        self._collections = Collections(parts)
        self._retrieval = Retrieval(parts)
        self._answering = Answering(parts, self._retrieval)
        self._estimation = Estimation(parts, self._collections)
        self._ingestion = Ingestion(parts, self._collections)
        self._ingestion.start()
        self._maintenance.start()
        self._clearance.start()
        self._warm_up = WarmUp(parts, self._collections)
        self._warm_up.start()

    @classmethod
    def open(cls, config: Config, *, on_progress: Callable[[str], None] | None = None) -> Memory:
        """Opens the store, loads the models, and goes on with whatever jobs were left.

        Raises:
            StoreLocked: another process has this store.
            ModelNotFound, UnsupportedModel, ModelDamaged: the model or embedder cannot be used.
            DatabaseUnavailable, DatabaseDamaged, MigrationNeeded: the database cannot be used as it is.
        """
        if config.query.policy != "auto":
            parse_policy(config.query.policy)
        return cls(Parts.open(config, on_progress or (lambda _: None)))

    def close(self, drain_seconds: float = 0.0) -> None:
        """Lets running answers finish for so long, ends the job in hand after its batch, closes the store."""
        try:
            self._ingestion.stop()
            self._maintenance.stop()
            self._clearance.stop()
            self._warm_up.stop()
        finally:
            self._parts.close(drain_seconds)

    # Service

    def info(self) -> Info:
        parts, model = self._parts, self._parts.model
        config = parts.config
        layout = self._collections.layout(config.kv.block_size)
        default = self._collections.new(CollectionCreate(name="default"))
        wanted = named_policy(config.query.policy)
        auto = cheapest_that_passed(
            parts.store.catalog.gates(default.fingerprint_digest),
            config.query,
            chunk_tokens=default.max_chunk_tokens,
        )
        return Info(
            version=memkv.__version__,
            model=ModelInfo(
                name=model.name,
                architecture=model.spec.architecture,
                dtype=model.dtype,
                device=model.device,
                kv_dtype=layout.dtype,
                block_size=layout.block_size,
                kv_bytes_per_token=layout.bytes_per_token,
                max_context=model.spec.max_context,
                weights_digest=model.weights_digest,
            ),
            embedder=EmbedderInfo(
                name=parts.embedder.name, dim=parts.embedder.dim, digest=parts.embedder.digest
            ),
            policies=policy_names(),
            default_policy=(wanted or auto.policy).name,
            max_body_bytes=parts.config.server.max_body_bytes,
            threads=asdict(parts.engine.stats().threads),
        )

    def ready(self) -> Readiness:
        """Whether queries and ingests would be served now, and what stands in the way."""
        checks = {
            "database": _check(lambda: self._parts.store.catalog.generation() >= 0, "does not answer"),
            "engine": _check(lambda: self._parts.engine.stats().alive, "the engine's thread has ended"),
            "jobs": _check(lambda: self._ingestion.is_alive, "the job thread has ended; see the log"),
            "maintenance": _check(lambda: self._maintenance.is_alive, "its thread has ended; see the log"),
            "clearance": _check(lambda: self._clearance.is_alive, "its thread has ended; see the log"),
        }
        ok = all(check.ok for check in checks.values())
        return Readiness(status="ready" if ok else "not_ready", checks=checks)

    # Collections

    def create_collection(
        self, request: CollectionCreate, *, exist_ok: bool = False, tenant: str = DEFAULT_TENANT
    ) -> Collection:
        """Makes a collection for the model at hand.

        Raises:
            CollectionExists: unless `exist_ok`.
            ConflictError: with `exist_ok`, where it exists with other settings.
        """
        require_valid(request)
        new = self._collections.new(request)
        try:
            row = self._parts.store.catalog.create_collection(tenant, new)
        except CollectionExists:
            if not exist_ok:
                raise
            row = self._parts.store.catalog.get_collection(tenant, request.name)
            require_same_settings(row, new)
        return self._collection_reply(row)

    def ingest(
        self,
        collection: str,
        documents: Sequence[DocumentCreate | DocumentUpload],
        *,
        wait: float | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> Accepted:
        """Makes documents durable, all or none, and queues what is to be done for them.

        Args:
            wait: seconds to wait for the job; its reply says whether that was enough.

        Raises:
            UnprocessableDocumentError, UnsupportedMediaTypeError, PayloadTooLargeError: names the document.
            FingerprintMismatch: the collection belongs to another model.
            InsufficientStorageError: its KV would pass a cap; nothing is kept.
        """
        opened = self._collections.by_name(tenant, collection)
        texts = [self._read(document, index, len(documents)) for index, document in enumerate(documents)]
        new = [_new_document(document, text) for document, text in zip(documents, texts, strict=True)]
        self._estimation.require_room(opened, [TitledText(row.title, row.text) for row in new])
        accepted = self._parts.store.accept_documents(tenant, opened.row.id, new)
        job_id = next((document.job_id for document in accepted.documents if document.job_id), None)
        job = None if job_id is None else self._parts.store.jobs.wait(tenant, job_id, wait or 0.0)
        finished = job is not None and job.is_finished
        replies = [
            accepted_reply(document, self._now(document.document) if finished else None, text.notes)
            for document, text in zip(accepted.documents, texts, strict=True)
        ]
        return Accepted(job=None if job is None else self._job_reply(job), documents=replies)

    def estimate(
        self,
        collection: str,
        documents: Sequence[DocumentCreate | DocumentUpload],
        *,
        tenant: str = DEFAULT_TENANT,
    ) -> Estimate:
        """What an ingest would cost; nothing is kept.

        Raises:
            UnprocessableDocumentError, UnsupportedMediaTypeError, PayloadTooLargeError: names the document.
            FingerprintMismatch: the collection belongs to another model.
        """
        texts = [self._read(document, index, len(documents)) for index, document in enumerate(documents)]
        titled = [
            TitledText(document.title or text.title, text.text)
            for document, text in zip(documents, texts, strict=True)
        ]
        return self._estimation.estimate(tenant, collection, titled)

    # Search and query

    def search(self, request: SearchRequest, *, tenant: str = DEFAULT_TENANT) -> SearchResponse:
        require_valid(request)
        question = clean_question(request.query)
        started = time.perf_counter()
        opened = self._collections.by_name(tenant, request.collection)
        found = self._retrieval.search(opened, question, request.top_k, request.filter, request.min_score)
        return SearchResponse(
            data=[hit.reply for hit in found], retrieve_ms=(time.perf_counter() - started) * 1000.0
        )

    def query(self, request: QueryRequest, *, tenant: str = DEFAULT_TENANT) -> QueryResponse:
        """Raises what `query_stream` raises, and `MemKVError` where generation fails."""
        with self.query_stream(request, tenant=tenant) as stream:
            return stream.response()

    def query_stream(self, request: QueryRequest, *, tenant: str = DEFAULT_TENANT) -> QueryStream:
        """Retrieves and submits before it returns, so that what cannot be answered is refused here.

        Raises:
            CollectionNotFound, ChunkNotFound, FingerprintMismatch, BadRequestError, FilterError,
            ContextTooLong.
        """
        require_valid(request)
        request = _as_conversation(request)
        return self._answering.start(self._collections.by_name(tenant, request.collection), request)

    # Store

    def reprefill(self, request: StoreCollection, *, tenant: str = DEFAULT_TENANT) -> StoreWork:
        """Queues making the KV that a collection lacks; of a stale collection, everything for this model.

        A collection made with another model is re-made: its texts are cut, embedded and prefilled again, and
        until that is done none of it is found.

        Raises:
            CollectionNotFound.
        """
        require_valid(request)
        return reprefill(self._parts, self._collections, request, tenant)

    def import_archive(
        self,
        path: Path,
        *,
        with_kv: bool = False,
        dry_run: bool = False,
        on_progress: Tell | None = None,
    ) -> Imported:
        """Takes the collections of an archive over; returns when they are ready. Trusts nothing in it.

        Args:
            with_kv: take KV for the very tokens that its texts give here, whoever made the archive.

        Raises:
            BadRequestError: the archive is refused.
            ConflictError: a collection of the name exists with other settings.
        """
        tell = on_progress or (lambda name, done, total: None)
        return import_archive(
            self, self._parts, self._collections, path, with_kv=with_kv, dry_run=dry_run, tell=tell
        )

    def metrics(self) -> list[Metric]:
        return [
            *super().metrics(),
            stale_metric(len(self._stale())),
            *self._answering.metrics(),
            *engine_metrics(self._parts.engine.stats()),
        ]

    def _abilities(self) -> Abilities:
        return replace(super()._abilities(), import_=self._import)

    def _import(self, request: StoreImport, tell: Tell) -> Imported:
        """From a name in the data directory's archives/."""
        path = self._archives.existing(request.archive)
        return self.import_archive(path, with_kv=request.kv, dry_run=request.dry_run, on_progress=tell)

    def _drop(self, input_keys: Iterable[str]) -> None:
        self._parts.engine.drop(input_keys)

    def _forget_collection(self, collection_id: str) -> None:
        self._collections.forget(collection_id)

    def _pool(self) -> dict[str, int]:
        lanes = self._parts.engine.stats().lanes
        states = [field.name for field in fields(BlockCounts)]
        return {state: sum(getattr(lane.blocks, state) for lane in lanes) for state in states}

    def _stale(self) -> list[str]:
        return [row.name for row in self._store.catalog.all_collections() if self._collections.is_stale(row)]

    def _resume_starved(self) -> None:
        resume_starved(self._parts, self._collections, self._estimation)

    def _recompute(
        self, count: int, repair: bool, deadline: float, on_progress: Callable[[int, int], None]
    ) -> Recomputed:
        return recompute(self._parts, self._collections, count, repair, deadline, on_progress)

    def _preload(self, files: Sequence[KVFileRow], on_progress: Callable[[int, int], None]) -> None:
        preload_beside_questions(self._parts, self._collections, files, on_progress)

    def _now(self, document: DocumentRow) -> DocumentRow | None:
        """A document as its job left it; None where it was deleted meanwhile."""
        try:
            return self._store.catalog.document_by_id(document.tenant, document.id)
        except DocumentNotFound:
            return None

    def _read(self, document: DocumentCreate | DocumentUpload, index: int, total: int) -> SourceText:
        require_valid(document)
        limit = self._parts.config.ingest.max_document_bytes
        try:
            if isinstance(document, DocumentUpload):
                return read_text(
                    document.data, document.filename or None, document.media_type or None, max_bytes=limit
                )
            return accept_text(document.text, max_bytes=limit)
        except MemKVError as error:
            if total > 1:
                name = getattr(document, "filename", "") or document.external_id or f"number {index + 1}"
                error.detail = f"document {name}: {error.detail}"
            raise


def _as_conversation(request: QueryRequest) -> QueryRequest:
    """The same with clean questions, a single one as `messages` too. Raises `BadRequestError`."""
    messages = [
        msgspec.structs.replace(message, content=clean_question(message.content))
        if message.role == "user"
        else message
        for message in request.messages or [Message(role="user", content=request.query)]
    ]
    return msgspec.structs.replace(request, query="", messages=messages)


def _check(healthy: Callable[[], bool], reason: str) -> Check:
    started = time.perf_counter()
    try:
        ok, why = healthy(), reason
    except MemKVError as error:
        ok, why = False, error.detail
    return Check(ok=ok, reason="" if ok else why, ms=(time.perf_counter() - started) * 1000.0)


def _new_document(document: DocumentCreate | DocumentUpload, source: SourceText) -> NewDocument:
    filename = document.filename if isinstance(document, DocumentUpload) else ""
    return NewDocument(
        text=source.text,
        external_id=document.external_id or filename or None,
        title=document.title or source.title,
        filename=filename,
        media_type=source.media_type,
        metadata=document.metadata,
    )
