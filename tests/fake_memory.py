"""A memory without a model: the methods of `memkv.memory.Memory` over dictionaries, with faults on demand.

For what the real one cannot be made to do at will: fail with each class of error, be slow, hang.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from memkv.errors import (
    CollectionExists,
    CollectionNotFound,
    ConflictError,
    DocumentNotFound,
    EmptyDocument,
    JobNotFound,
)
from memkv.wire import (
    Accepted,
    AcceptedDocument,
    Check,
    Collection,
    CollectionCounts,
    CollectionCreate,
    Document,
    DocumentCreate,
    DocumentUpload,
    EmbedderInfo,
    Info,
    Job,
    JobCounts,
    JobProgress,
    ModelInfo,
    OutputDelta,
    Page,
    PageRequest,
    QueryCompleted,
    QueryCreated,
    QueryEvent,
    QueryRequest,
    QueryResponse,
    Readiness,
    RetrievalCompleted,
    RetrievedChunk,
    ReuseReport,
    SearchRequest,
    SearchResponse,
    StoreStats,
    Timings,
    Usage,
)

_NOW = "2025-01-01T00:00:00Z"


class NoKeys:
    """Those of a store that has none. Nothing waits for the gate: it is not the memory that hangs."""

    def key_of(self, secret: str) -> None: ...
    def lack_admin(self) -> bool:
        return False


@dataclass
class FakeMemory:
    """Attributes:
    faults: method name -> error to raise.
    keys: those of a server that asks for them, or none.
    gate: cleared, every call waits for it (a hanging store); set, nothing waits.
    token_seconds: between two tokens of an answer.
    tokens: of an answer.
    job_seconds: until a job is finished.
    """

    faults: dict[str, BaseException] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    token_seconds: float = 0.0
    tokens: int = 5
    job_seconds: float = 0.0
    is_ready: bool = True
    running: int = 0
    calls: list[str] = field(default_factory=list)
    keys: Any = field(default_factory=NoKeys)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._empty()

    def reset(self) -> None:
        """Empty, quick and without faults."""
        self.faults.clear()
        self.calls.clear()
        self.token_seconds, self.tokens, self.job_seconds, self.is_ready = 0.0, 5, 0.0, True
        self._empty()

    def _empty(self) -> None:
        self.gate.set()
        self._ids = itertools.count(1)
        self._collections: dict[str, Collection] = {}
        self._documents: dict[str, dict[str, tuple[Document, str]]] = {}
        self._jobs: dict[str, tuple[Job, float]] = {}

    def info(self, *, tenant: str = "default") -> Info:
        self._enter("info")
        model = ModelInfo(
            name="fake",
            architecture="fake",
            dtype="float32",
            device="cpu",
            kv_dtype="bfloat16",
            block_size=16,
            kv_bytes_per_token=1,
            max_context=1024,
            weights_digest="0" * 64,
        )
        return Info(
            version="0",
            model=model,
            embedder=EmbedderInfo(name="fake", dim=1, digest="0" * 64),
            policies=["exact", "map"],
            default_policy="exact",
            max_body_bytes=1,
        )

    def ready(self) -> Readiness:
        self._enter("ready")
        status = "ready" if self.is_ready else "not_ready"
        return Readiness(status=status, checks={"store": Check(ok=self.is_ready, reason="")})

    def create_collection(
        self, wanted: CollectionCreate, *, exist_ok: bool = False, tenant: str = "default"
    ) -> Collection:
        self._enter("create_collection")
        with self._lock:
            known = self._collections.get(wanted.name)
            if known is not None:
                if not exist_ok:
                    raise CollectionExists(f"{wanted.name} exists", hint="choose another name")
                if wanted.description not in ("", known.description):
                    raise ConflictError(f"{wanted.name} exists with other settings")
                return known
            created = Collection(
                id=f"col_{next(self._ids):08d}",
                name=wanted.name,
                description=wanted.description,
                metadata=wanted.metadata,
                model="fake",
                fingerprint="0" * 64,
                embedder="fake",
                chunk_tokens=wanted.chunk_tokens or 256,
                block_size=wanted.block_size or 16,
                prefill=wanted.prefill or "eager",
                max_kv_bytes=wanted.max_kv_bytes,
                system_prompt=wanted.system_prompt or "",
                primer=wanted.primer,
                prefix_tokens=1,
                counts=CollectionCounts(),
                kv_bytes=0,
                by_status={},
                created_at=_NOW,
            )
            self._collections[wanted.name] = created
            self._documents[wanted.name] = {}
            return created

    def list_collections(
        self, page: PageRequest, *, within: frozenset[str] | None = None, tenant: str = "default"
    ) -> Page[Collection]:
        self._enter("list_collections")
        return _page(
            [each for each in self._collections.values() if within is None or each.name in within], page
        )

    def get_collection(self, name: str, *, tenant: str = "default") -> Collection:
        self._enter("get_collection")
        if name not in self._collections:
            raise CollectionNotFound(f"there is no collection {name}", hint="create it first")
        return self._collections[name]

    def delete_collection(self, name: str, *, tenant: str = "default") -> None:
        self.get_collection(name)
        self._enter("delete_collection")
        with self._lock:
            del self._collections[name], self._documents[name]

    def ingest(
        self,
        collection: str,
        documents: Sequence[DocumentCreate | DocumentUpload],
        *,
        wait: float | None = None,
        tenant: str = "default",
    ) -> Accepted:
        self.get_collection(collection)
        self._enter("ingest")
        with self._lock:
            accepted = [self._accept(collection, document) for document in documents]
            if all(entry.outcome == "unchanged" for entry in accepted):
                return Accepted(job=None, documents=accepted)
            job = self._new_job(collection, len(documents))
        if wait:
            job = self.wait_job(job.id, wait)
        return Accepted(job=job, documents=accepted)

    def _accept(self, collection: str, sent: DocumentCreate | DocumentUpload) -> AcceptedDocument:
        text = sent.text if isinstance(sent, DocumentCreate) else sent.data.decode("utf-8")
        if not text.strip():
            raise EmptyDocument("the document holds no text", hint="send text")
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        external_id = sent.external_id or getattr(sent, "filename", "") or digest[:16]
        known = self._documents[collection].get(external_id)
        outcome = "created" if known is None else "unchanged" if known[1] == text else "updated"
        document = Document(
            id=known[0].id if known else f"doc_{next(self._ids):08d}",
            external_id=external_id,
            collection=collection,
            title=sent.title,
            metadata=sent.metadata,
            status="ready",
            content_hash=digest,
            bytes=len(text.encode()),
            chunks=1,
            tokens=len(text.split()),
            created_at=_NOW,
            updated_at=_NOW,
        )
        self._documents[collection][external_id] = (document, text)
        return AcceptedDocument(
            id=document.id, external_id=external_id, content_hash=digest, outcome=outcome, status="ready"
        )

    def _new_job(self, collection: str, documents: int) -> Job:
        job = Job(
            id=f"job_{next(self._ids):08d}",
            kind="ingest",
            collection=collection,
            status="queued",
            progress=JobProgress(stage="prefill", done=0, total=documents, unit="documents"),
            counts=JobCounts(documents=documents),
            errors=[],
            attempts=1,
            created_at=_NOW,
        )
        self._jobs[job.id] = (job, time.monotonic() + self.job_seconds)
        return self.get_job(job.id)

    def list_documents(
        self,
        collection: str,
        page: PageRequest,
        *,
        status: str = "",
        filter: dict[str, Any] | None = None,
        tenant: str = "default",
    ) -> Page[Document]:
        self.get_collection(collection)
        self._enter("list_documents")
        found = [
            document
            for document, _ in self._documents[collection].values()
            if status in ("", document.status) and _matches(document, filter)
        ]
        return _page(found, page)

    def get_document(self, collection: str, key: str, *, tenant: str = "default") -> Document:
        return self._find(collection, key)[0]

    def forget(self, collection: str, key: str, *, tenant: str = "default") -> None:
        self._enter("forget")
        document, _ = self._find(collection, key)
        with self._lock:
            del self._documents[collection][document.external_id]

    def _find(self, collection: str, key: str) -> tuple[Document, str]:
        self.get_collection(collection)
        for document, text in self._documents[collection].values():
            if key in (document.id, document.external_id):
                return document, text
        raise DocumentNotFound(f"there is no document {key} in {collection}")

    def list_jobs(
        self,
        page: PageRequest,
        *,
        kind: str = "",
        status: str = "",
        collection: str = "",
        within: frozenset[str] | None = None,
        tenant: str = "default",
    ) -> Page[Job]:
        self._enter("list_jobs")
        jobs = [job for key in self._jobs if kind in ("", (job := self.get_job(key)).kind)]
        jobs = [job for job in jobs if within is None or job.collection in within]
        return _page(
            [job for job in jobs if status in ("", job.status) and collection in ("", job.collection)], page
        )

    def get_job(self, job_id: str, *, within: frozenset[str] | None = None, tenant: str = "default") -> Job:
        self._enter("get_job")
        if job_id not in self._jobs or (
            within is not None and self._jobs[job_id][0].collection not in within
        ):
            raise JobNotFound(f"there is no job {job_id}")
        job, done_at = self._jobs[job_id]
        if time.monotonic() < done_at:
            return job
        return msgspec.structs.replace(job, status="succeeded", finished_at=_NOW)

    def wait_job(
        self,
        job_id: str,
        timeout: float | None,
        on_progress: Callable[[Job], None] | None = None,
        *,
        tenant: str = "default",
    ) -> Job:
        deadline = time.monotonic() + (timeout if timeout is not None else 60)
        while True:
            job = self.get_job(job_id)
            if on_progress is not None:
                on_progress(job)
            if job.status in ("succeeded", "failed") or time.monotonic() >= deadline:
                return job
            time.sleep(0.01)

    def search(self, request: SearchRequest, *, tenant: str = "default") -> SearchResponse:
        self._enter("search")
        return SearchResponse(data=self._retrieve(request.collection, request.query, request.top_k))

    def _retrieve(self, collection: str, query: str, top_k: int | None) -> list[RetrievedChunk]:
        self.get_collection(collection)
        words = set(query.lower().split())
        chunks = [
            RetrievedChunk(
                chunk_id=f"chk_{document.id[4:]}",
                document_id=document.id,
                external_id=document.external_id,
                title=document.title,
                score=len(words & set(text.lower().split())) / (len(words) or 1),
                text=text,
                start=0,
                end=len(text),
                tokens=document.tokens,
                metadata=document.metadata,
            )
            for document, text in self._documents[collection].values()
        ]
        return sorted(chunks, key=lambda chunk: -chunk.score)[: top_k or 4]

    def query(self, request: QueryRequest, *, tenant: str = "default") -> QueryResponse:
        with self.query_stream(request) as stream:
            completed = [event for event in stream if isinstance(event, QueryCompleted)]
        return completed[0].response

    def query_stream(self, request: QueryRequest, *, tenant: str = "default") -> FakeQueryStream:
        self._enter("query_stream")
        return FakeQueryStream(
            self, request, self._retrieve(request.collection, request.question, request.top_k)
        )

    def store_stats(self, *, tenant: str = "default") -> StoreStats:
        self._enter("store_stats")
        return StoreStats(
            store_id="0" * 32,
            data_dir="nowhere",
            generation=0,
            collections=len(self._collections),
            documents=0,
            chunks=0,
            tokens=0,
            kv_files=0,
            kv_bytes=0,
            database={"dialect": "fake"},
            warnings=[],
            pool={"free": 1},
            counters={},
        )

    def metrics(self) -> list[Any]:
        self._enter("metrics")
        return []

    def close(self, drain_seconds: float = 0) -> None:
        self.gate.set()

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        self.gate.wait()
        if method in self.faults:
            raise self.faults[method]


class FakeQueryStream:
    """Events of one fake answer; `close()` may come from any thread."""

    def __init__(self, memory: FakeMemory, request: QueryRequest, chunks: list[RetrievedChunk]) -> None:
        self._memory = memory
        self._request = request
        self._chunks = chunks
        self._cancelled = threading.Event()
        self._open = True
        memory.running += 1

    def __enter__(self) -> FakeQueryStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._cancelled.set()
        with self._memory._lock:
            if self._open:
                self._open = False
                self._memory.running -= 1

    def __iter__(self) -> Iterator[QueryEvent]:
        memory = self._memory
        yield QueryCreated(id="qry_1")
        yield RetrievalCompleted(chunks=self._chunks, retrieve_ms=0.1)
        count = min(self._request.generation.max_tokens or memory.tokens, memory.tokens)
        for index in range(count):
            if self._cancelled.wait(memory.token_seconds):
                return
            if "token" in memory.faults and index == count - 1:
                raise memory.faults["token"]
            yield OutputDelta(text=f"word{index} ")
        answer = "".join(f"word{index} " for index in range(count))
        response = QueryResponse(
            id="qry_1",
            answer=answer,
            finish_reason="length",
            citations=[],
            chunks=self._chunks,
            usage=Usage(completion_tokens=count),
            reuse=ReuseReport(mode=self._request.reuse, policy=self._request.policy or "exact"),
            timings=Timings(),
        )
        yield QueryCompleted(response=response)


def _matches(document: Document, wanted: dict[str, Any] | None) -> bool:
    return wanted is None or all(document.metadata.get(key) == value for key, value in wanted.items())


def _page(entries: list[Any], page: PageRequest) -> Page[Any]:
    ordered = entries if page.order == "asc" else entries[::-1]
    ids = [entry.id for entry in ordered]
    if page.after in ids:
        ordered = ordered[ids.index(page.after) + 1 :]
    shown = ordered[: page.limit]
    return Page(
        data=shown,
        has_more=len(ordered) > len(shown),
        first_id=shown[0].id if shown else "",
        last_id=shown[-1].id if shown else "",
    )
