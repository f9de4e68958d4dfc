"""`Memory`: what a server, an embedded client and the command line all call.

It speaks `memkv.wire`, is synchronous and may be called from any thread. Everything below it raises
`memkv.errors` only, and so does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, get_args

import msgspec

import memkv
from memkv.config import Config
from memkv.engine.reuse import parse_policy, policy_names
from memkv.errors import BadRequestError, CollectionExists, CollectionNotFound, MemKVError
from memkv.memory.answering import Answering, QueryStream
from memkv.memory.collections import Collections, model_of, require_same_settings
from memkv.memory.gate import choose_policy
from memkv.memory.ingestion import Ingestion
from memkv.memory.parts import Parts
from memkv.memory.replies import (
    accepted_reply,
    collection_reply,
    document_reply,
    job_reply,
    page_reply,
    page_rows,
    stats_reply,
)
from memkv.memory.retrieval import Retrieval
from memkv.store.filters import parse_filter
from memkv.store.rows import DEFAULT_TENANT, CollectionRow, JobRow, NewDocument
from memkv.text.reader import SourceText, accept_text, clean_question, read_text
from memkv.validation import Violation, validate_request
from memkv.wire import (
    Accepted,
    Check,
    Collection,
    CollectionCreate,
    Document,
    DocumentCreate,
    DocumentStatus,
    DocumentUpload,
    EmbedderInfo,
    Filter,
    Info,
    Job,
    JobStatus,
    Message,
    ModelInfo,
    Page,
    PageRequest,
    QueryRequest,
    QueryResponse,
    Readiness,
    Request,
    SearchRequest,
    SearchResponse,
    StoreProblem,
    StoreStats,
    StoreVerification,
)


class Memory:
    """Documents in, answers out. Open it with `Memory.open`; close it, or use it as a context manager."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._collections = Collections(parts)
        self._retrieval = Retrieval(parts)
        self._answering = Answering(parts, self._retrieval)
        self._ingestion = Ingestion(parts, self._collections)
        self._ingestion.start()

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
        finally:
            self._parts.close(drain_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Service

    def info(self) -> Info:
        parts, model = self._parts, self._parts.model
        config = parts.config
        layout = self._collections.layout(config.kv.block_size)
        default = self._collections.new(CollectionCreate(name="default"))
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
            default_policy=choose_policy(
                config.query.policy,
                parts.store.catalog,
                default.fingerprint_digest,
                default.max_chunk_tokens,
                config.query,
            ).policy.name,
            max_body_bytes=parts.config.server.max_body_bytes,
            threads=asdict(parts.engine.stats().threads),
        )

    def ready(self) -> Readiness:
        """Whether queries and ingests would be served now, and what stands in the way."""
        checks = {
            "database": _check(lambda: self._parts.store.catalog.generation() >= 0, "does not answer"),
            "engine": _check(lambda: self._parts.engine.stats().alive, "the engine's thread has ended"),
            "jobs": _check(lambda: self._ingestion.is_alive, "the job thread has ended; see the log"),
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
        _validate(request)
        new = self._collections.new(request)
        try:
            row = self._parts.store.catalog.create_collection(tenant, new)
        except CollectionExists:
            if not exist_ok:
                raise
            row = self._parts.store.catalog.get_collection(tenant, request.name)
            require_same_settings(row, new)
        return self._collection_reply(row)

    def list_collections(self, page: PageRequest, *, tenant: str = DEFAULT_TENANT) -> Page[Collection]:
        _validate(page)
        found = self._parts.store.catalog.list_collections(tenant, page_rows(page))
        return page_reply(found, self._collection_reply, lambda reply: reply.id)

    def get_collection(self, name: str, *, tenant: str = DEFAULT_TENANT) -> Collection:
        return self._collection_reply(self._parts.store.catalog.get_collection(tenant, name))

    def delete_collection(self, name: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """Gone for queries that start after it returns; running ones end on what they hold."""
        deleted = self._parts.store.delete_collection(tenant, name)
        self._collections.forget(deleted.collection_id)
        self._parts.engine.drop(file.input_key for file in deleted.released)

    # Documents

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
        """
        opened = self._collections.by_name(tenant, collection)
        texts = [self._read(document, index, len(documents)) for index, document in enumerate(documents)]
        new = [_new_document(document, text) for document, text in zip(documents, texts, strict=True)]
        accepted = self._parts.store.accept_documents(tenant, opened.row.id, new)
        job_id = next((document.job_id for document in accepted.documents if document.job_id), None)
        job = None if job_id is None else self._parts.store.jobs.wait(tenant, job_id, wait or 0.0)
        catalog, finished = self._parts.store.catalog, job is not None and job.is_finished
        replies = [
            accepted_reply(
                document,
                catalog.get_document(tenant, opened.row.id, document.document.id) if finished else None,
                text.notes,
            )
            for document, text in zip(accepted.documents, texts, strict=True)
        ]
        return Accepted(job=None if job is None else self._job_reply(job), documents=replies)

    def list_documents(
        self,
        collection: str,
        page: PageRequest,
        *,
        status: str = "",
        filter: Filter | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> Page[Document]:
        _validate(page)
        wanted = _one_of(DocumentStatus, status)
        row = self._parts.store.catalog.get_collection(tenant, collection)
        found = self._parts.store.catalog.list_documents(
            tenant,
            row.id,
            page_rows(page),
            status=wanted,
            matching=parse_filter(filter),
        )
        return page_reply(found, lambda document: document_reply(document, row.name), lambda reply: reply.id)

    def get_document(self, collection: str, document: str, *, tenant: str = DEFAULT_TENANT) -> Document:
        """By id or external id."""
        row = self._parts.store.catalog.get_collection(tenant, collection)
        return document_reply(self._parts.store.catalog.get_document(tenant, row.id, document), row.name)

    def forget(self, collection: str, document: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """Deletes a document by id or external id: no query that starts after this sees it."""
        row = self._parts.store.catalog.get_collection(tenant, collection)
        change = self._parts.store.delete_document(tenant, row.id, document)
        self._parts.engine.drop(file.input_key for file in change.released)

    # Jobs

    def list_jobs(
        self, page: PageRequest, *, status: str = "", collection: str = "", tenant: str = DEFAULT_TENANT
    ) -> Page[Job]:
        _validate(page)
        wanted = _one_of(JobStatus, status)
        collection_id = (
            self._parts.store.catalog.get_collection(tenant, collection).id if collection else None
        )
        found = self._parts.store.jobs.list(
            tenant, page_rows(page), status=wanted, collection_id=collection_id
        )
        return page_reply(found, self._job_reply, lambda reply: reply.id)

    def get_job(self, job_id: str, *, tenant: str = DEFAULT_TENANT) -> Job:
        return self._job_reply(self._parts.store.jobs.get(tenant, job_id))

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
            job = self._parts.store.jobs.wait(tenant, job_id, max(0.0, min(left, 0.25)))
            reply = self._job_reply(job)
            if on_progress is not None:
                on_progress(reply)
            if job.is_finished or left <= 0:
                return reply

    # Search and query

    def search(self, request: SearchRequest, *, tenant: str = DEFAULT_TENANT) -> SearchResponse:
        _validate(request)
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
        _validate(request)
        request = _as_conversation(request)
        return self._answering.start(self._collections.by_name(tenant, request.collection), request)

    # Store

    def store_stats(self) -> StoreStats:
        return stats_reply(self._parts.store.stats(), self._parts.engine.stats())

    def verify_store(
        self, full: bool, on_progress: Callable[[int, int], None] | None = None
    ) -> StoreVerification:
        """Compares database and files; `full` reads and checks every byte. Changes nothing."""
        started = time.perf_counter()
        problems = self._parts.store.verify(full=full, on_progress=on_progress)
        kv_files, kv_bytes = self._parts.store.catalog.kv_totals()
        return StoreVerification(
            full=full,
            kv_files=kv_files,
            kv_bytes=kv_bytes,
            problems=[StoreProblem(kind=p.kind, name=p.name, detail=p.detail) for p in problems],
            seconds=time.perf_counter() - started,
        )

    def _read(self, document: DocumentCreate | DocumentUpload, index: int, total: int) -> SourceText:
        _validate(document)
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

    def _collection_reply(self, row: CollectionRow) -> Collection:
        counts = self._parts.store.catalog.count_collection(row.tenant, row.id)
        return collection_reply(row, counts, model_of(row, self._parts.model))

    def _job_reply(self, row: JobRow) -> Job:
        try:
            collection = self._parts.store.catalog.collection_by_id(row.tenant, row.collection_id).name
        except CollectionNotFound:  # deleted since
            collection = ""
        return job_reply(row, collection, self._parts.store.jobs.items(row.tenant, row.id))


def _validate(request: Request) -> None:
    try:
        validate_request(request)
    except Violation as error:
        hint = error.hint or "a server describes every field and its limits at /docs"
        raise BadRequestError(str(error), hint=hint) from error


def _as_conversation(request: QueryRequest) -> QueryRequest:
    """The same with clean questions, a single one as `messages` too. Raises `BadRequestError`."""
    messages = [
        msgspec.structs.replace(message, content=clean_question(message.content))
        if message.role == "user"
        else message
        for message in request.messages or [Message(role="user", content=request.query)]
    ]
    return msgspec.structs.replace(request, query="", messages=messages)


def _one_of(choices: Any, word: str) -> Any:
    """`word` as one of a Literal's choices; None for an empty one. Raises `BadRequestError`."""
    possible = get_args(choices)
    if word and word not in possible:
        raise BadRequestError(f"status {word!r} is not known", hint=", ".join(possible))
    return word or None


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
