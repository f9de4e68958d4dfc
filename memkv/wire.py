"""What the server, the SDK and `Memory` say to one another: typed structs, JSON on the wire.

Requests refuse unknown fields. No torch and no SQLAlchemy here. Longer than other modules: it is the whole
vocabulary, in the order of the chapters of the API, and nearly without logic.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta, Struct, field

from memkv import admission
from memkv.errors import MemKVError

T = TypeVar("T")

Metadata = dict[str, str | int | float | bool | None]
Filter = dict[
    str, Any
]  # {"type": "eq", "key": ..., "value": ...} | {"type": "and", "filters": [...]} | {key: value}

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$(?!\n)"
ARCHIVE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,122}\.tar$(?!\n)"
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
ArchiveName = Annotated[str, Meta(pattern=ARCHIVE_PATTERN)]
ExternalId = Annotated[str, Meta(min_length=1, max_length=512)]
Title = Annotated[str, Meta(max_length=512)]
TopK = Annotated[int, Meta(ge=1, le=1000)]
ChunkId = Annotated[str, Meta(min_length=1, max_length=128)]
QueryText = Annotated[str, Meta(min_length=1, max_length=100_000)]

DocumentStatus = Literal["pending", "ready", "failed"]
JobStatus = Literal["queued", "running", "succeeded", "partial", "failed", "cancelled"]
Prefill = Annotated[str, Meta(pattern=admission.PATTERN)]
Reuse = Literal["auto", "off", "strict"]
Scope = Literal["read", "write", "admin"]  # of a key; each allows what those before it do
KeyLabel = Annotated[str, Meta(max_length=128)]
CollectionNames = Annotated[list[Name], Meta(min_length=1, max_length=100)]
ExpirySeconds = Annotated[int, Meta(ge=0, le=10**10)]


class Request(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Root of everything that a client sends."""


class Reply(Struct, frozen=True, kw_only=True):
    """Root of everything that the server sends."""


# Errors


class ProblemItem(Reply, frozen=True, kw_only=True):
    message: str
    loc: str = ""
    code: str = ""


class Problem(Reply, frozen=True, kw_only=True):
    """An `application/problem+json` body (RFC 9457) with a stable code and a hint."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str = ""
    instance: str = ""
    request_id: str = ""
    errors: list[ProblemItem] = []


def problem_for(error: MemKVError, *, instance: str = "", request_id: str = "") -> Problem:
    """What a client is told of an error; `memkv.errors.error_for(code, status)` leads back to its class."""
    return Problem(
        type=f"urn:memkv:problem:{error.code}",
        title=error.code.replace("_", " ").capitalize(),
        status=error.status,
        detail=error.detail,
        code=error.code,
        hint=error.hint,
        instance=instance,
        request_id=request_id or error.request_id,
    )


# Service


class Health(Reply, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"


class ModelInfo(Reply, frozen=True, kw_only=True):
    name: str
    architecture: str
    dtype: str
    device: str
    kv_dtype: str
    block_size: int
    kv_bytes_per_token: int
    max_context: int
    weights_digest: str


class EmbedderInfo(Reply, frozen=True, kw_only=True):
    name: str
    dim: int
    digest: str


class Info(Reply, frozen=True, kw_only=True):
    version: str
    model: ModelInfo
    embedder: EmbedderInfo
    policies: list[str]
    default_policy: str
    max_body_bytes: int
    threads: dict[str, int] = {}  # of torch and of the kernels; 0 until they are measured


class Check(Reply, frozen=True, kw_only=True):
    ok: bool
    reason: str = ""
    ms: float = 0.0


class Readiness(Reply, frozen=True, kw_only=True):
    status: Literal["ready", "not_ready"]
    checks: dict[str, Check]


class Page(Reply, Generic[T], frozen=True, kw_only=True):
    data: list[T]
    has_more: bool = False
    first_id: str = ""
    last_id: str = ""
    object: Literal["list"] = "list"


class PageRequest(Request, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"
    after: str = ""
    before: str = ""


# Collections


class CollectionSettings(Request, frozen=True, kw_only=True):
    """What a collection may be given; what is None comes from the server's configuration."""

    description: Annotated[str, Meta(max_length=4096)] = ""
    metadata: Metadata = {}
    chunk_tokens: Annotated[int, Meta(ge=16, le=4096)] | None = None
    block_size: Literal[8, 16, 32] | None = None
    prefill: Prefill | None = None
    max_kv_bytes: Annotated[int, Meta(ge=0, le=2**53)] = 0  # of block files made for it; 0: no cap of its own
    system_prompt: Annotated[str, Meta(max_length=16_384)] | None = None
    primer: bool = False  # whether the prefix ends with some documents, so that no chunk was the first


class CollectionCreate(CollectionSettings, frozen=True, kw_only=True):
    name: Name


class CollectionPut(CollectionSettings, frozen=True, kw_only=True):
    """Create-or-get by the name in the path; a name in the body must be the same."""

    name: Name | None = None


class CollectionPatch(Request, frozen=True, kw_only=True):
    """What of a collection can be changed; None leaves it as it is."""

    description: Annotated[str, Meta(max_length=4096)] | None = None
    prefill: Prefill | None = None
    max_kv_bytes: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class CollectionCounts(Reply, frozen=True, kw_only=True):
    documents: int = 0
    chunks: int = 0
    tokens: int = 0
    kv_files: int = 0  # the prefix's included


class Collection(Reply, frozen=True, kw_only=True):
    id: str
    name: str
    description: str
    metadata: Metadata
    model: str
    fingerprint: str
    embedder: str
    chunk_tokens: int
    block_size: int
    prefill: Prefill
    max_kv_bytes: int
    system_prompt: str
    primer: bool
    prefix_tokens: int
    counts: CollectionCounts
    kv_bytes: int
    by_status: dict[str, int]
    created_at: str


# Documents and jobs


class DocumentCreate(Request, frozen=True, kw_only=True):
    text: str
    title: Title = ""
    external_id: ExternalId | None = None
    metadata: Metadata = {}


class DocumentUpload(Request, frozen=True, kw_only=True):
    """A file's bytes; its type is told by its name or media type."""

    data: bytes
    filename: str = ""
    media_type: str = ""
    title: Title = ""
    external_id: ExternalId | None = None
    metadata: Metadata = {}


class Document(Reply, frozen=True, kw_only=True):
    id: str
    external_id: str
    collection: str
    title: str
    metadata: Metadata
    status: DocumentStatus
    content_hash: str
    bytes: int  # of the text in UTF-8
    chunks: int
    tokens: int
    created_at: str
    updated_at: str
    error: Problem | None = None


class AcceptedDocument(Reply, frozen=True, kw_only=True):
    id: str
    external_id: str
    content_hash: str
    outcome: Literal["created", "updated", "unchanged"]
    status: DocumentStatus
    notes: list[str] = []  # what normalisation did to the text


class Estimate(Reply, frozen=True, kw_only=True):
    """What documents will cost. Chunks and tokens are counted once each; `new` ones have no KV yet."""

    collection_exists: bool  # else it is counted with the default settings
    documents: int
    chunks: int
    tokens: int
    new_chunks: int
    new_tokens: int
    kv_bytes: int  # of block files, for the new ones
    index_bytes: int
    prefill_seconds: float  # for the new ones, at the speed of this engine
    keep_after_uses: int | None  # from so many uses on, keeping costs less time than computing; None: never
    room_bytes: int  # below the caps and on the disk
    fits: bool


class JobProgress(Reply, frozen=True, kw_only=True):
    """How far a job is. Of an ingest, bytes of text: they are known beforehand, and grow chunk by chunk."""

    stage: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""


class JobCounts(Reply, frozen=True, kw_only=True):
    documents: int = 0
    chunks: int = 0
    chunks_prefilled: int = 0
    chunks_reused: int = 0
    tokens_prefilled: int = 0
    kv_bytes_written: int = 0
    bytes_before: int = 0  # of blocks/, indexes/ and quarantine/: of finished jobs about the store
    bytes_after: int = 0


class FailedItem(Reply, frozen=True, kw_only=True):
    document_id: str
    problem: Problem


class Job(Reply, frozen=True, kw_only=True):
    id: str
    kind: str
    collection: str
    status: JobStatus
    progress: JobProgress
    counts: JobCounts
    errors: list[Problem]
    attempts: int
    created_at: str
    started_at: str = ""
    finished_at: str = ""
    owner: str = ""  # the process that runs it
    heartbeat_at: str = ""  # when that one was last heard of
    cancel_requested: bool = False  # it ends when what it has in hand is done
    failed: list[FailedItem] = []  # the first hundred of its documents that could not be made ready, in order
    verification: StoreVerification | None = None  # of a finished `verify`
    exported: Exported | None = None  # of a finished `export`
    imported: Imported | None = None  # of a finished `import`
    change: StoreChange | None = None  # of a finished `gc`, `evict`, `compact` or `purge`
    snapshot: Snapshot | None = None  # of a finished `snapshot`


class Accepted(Reply, frozen=True, kw_only=True):
    """Answer to an ingest: the job, if there is work, and what became of each document in the order sent."""

    job: Job | None  # none where every document was unchanged
    documents: list[AcceptedDocument]


# Search and query


class SearchRequest(Request, frozen=True, kw_only=True):
    query: QueryText
    collection: Name
    top_k: TopK | None = None
    filter: Filter | None = None
    min_score: Annotated[float, Meta(ge=-1.0, le=1.0)] | None = None


class RetrievedChunk(Reply, frozen=True, kw_only=True):
    chunk_id: str
    document_id: str
    external_id: str
    title: str
    score: float
    text: str
    start: int  # characters of the document's text
    end: int
    tokens: int
    metadata: Metadata


class SearchResponse(Reply, frozen=True, kw_only=True):
    data: list[RetrievedChunk]
    retrieve_ms: float = 0.0


class Generation(Request, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=32_768)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0)] = 0  # 0: all
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = []


class Message(Request, frozen=True, kw_only=True):
    """A question or an answer of a conversation, as the client keeps it."""

    role: Literal["user", "assistant"]
    content: Annotated[str, Meta(max_length=100_000)]
    chunk_ids: Annotated[list[ChunkId], Meta(max_length=1000)] = []  # its answer's `chunks`, in order


class QueryRequest(Request, frozen=True, kw_only=True):
    """A question, or a conversation that ends with one: either `query` or `messages`.

    In a conversation questions and answers alternate, from the first question on. A question that was
    answered carries in `chunk_ids` the ids of its response's `chunks`; a chunk that already stands in the
    conversation is not put there again. The server keeps no conversation, only KV that it may reuse: what is
    sent back as it came need not be computed again.
    """

    query: Annotated[str, Meta(max_length=100_000)] = ""
    messages: Annotated[list[Message], Meta(max_length=999)] = []
    collection: Name
    top_k: TopK | None = None
    filter: Filter | None = None
    min_score: Annotated[float, Meta(ge=-1.0, le=1.0)] | None = None
    policy: Annotated[str, Meta(max_length=64)] | None = None  # auto, or what Info.policies lists
    reuse: Reuse = "auto"
    generation: Generation = field(default_factory=Generation)
    stream: bool = False

    @property
    def question(self) -> str:
        """What is to be answered now."""
        return self.messages[-1].content if self.messages else self.query


class Quote(Reply, frozen=True, kw_only=True):
    start: int  # characters of the chunk's text
    end: int


class CitationSource(Reply, frozen=True, kw_only=True):
    document_id: str
    external_id: str
    title: str
    chunk_id: str
    quote: Quote
    score: float


class Citation(Reply, frozen=True, kw_only=True):
    """A span of the answer and the chunks that support it."""

    start: int
    end: int
    text: str
    sources: list[CitationSource]


class Usage(Reply, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0  # mapped, not computed
    prefilled_tokens: int = 0
    looked_tokens: int = 0  # of the pass by which the policy chose; not kept
    completion_tokens: int = 0


class ReuseReport(Reply, frozen=True, kw_only=True):
    mode: Reuse
    policy: str
    fallback_reason: str = ""
    blocks_shared: int = 0
    blocks_fresh: int = 0
    continued_tokens: int = 0  # of the cached ones, those that earlier answers left
    healed_chunks: int = 0  # computed again because their KV was missing or damaged


class Timings(Reply, frozen=True, kw_only=True):
    retrieve_ms: float = 0.0
    queue_ms: float = 0.0
    load_ms: float = 0.0
    look_ms: float = 0.0  # of a policy that looks before it chooses
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0  # from the question's arrival to the first token, retrieval included
    total_ms: float = 0.0


class QueryResponse(Reply, frozen=True, kw_only=True):
    id: str
    answer: str
    finish_reason: Literal["stop", "length", "cancelled", "no_match"]
    citations: list[Citation]
    chunks: list[RetrievedChunk]  # put into the prompt for this question, in its order
    usage: Usage
    reuse: ReuseReport
    timings: Timings
    earlier_chunks: list[RetrievedChunk] = []  # of earlier turns: those that citations name; scores are 0


class QueryCreated(Reply, tag="query.created", tag_field="type", frozen=True, kw_only=True):
    id: str


class RetrievalCompleted(Reply, tag="retrieval.completed", tag_field="type", frozen=True, kw_only=True):
    chunks: list[RetrievedChunk]
    retrieve_ms: float


class OutputDelta(Reply, tag="output.delta", tag_field="type", frozen=True, kw_only=True):
    text: str


class CitationAdded(Reply, tag="citation.added", tag_field="type", frozen=True, kw_only=True):
    citation: Citation


class QueryCompleted(Reply, tag="query.completed", tag_field="type", frozen=True, kw_only=True):
    response: QueryResponse


class QueryFailed(Reply, tag="error", tag_field="type", frozen=True, kw_only=True):
    problem: Problem


QueryEvent = QueryCreated | RetrievalCompleted | OutputDelta | CitationAdded | QueryCompleted | QueryFailed


# Store


class StoreStats(Reply, frozen=True, kw_only=True):
    store_id: str
    data_dir: str
    generation: int  # grows with every change
    collections: int
    documents: int
    chunks: int
    tokens: int
    kv_files: int
    kv_bytes: int
    database: dict[str, str]  # the backend and the settings that durability rests on
    warnings: list[str]  # what makes it less durable than it could be
    pool: dict[str, int]  # blocks by state; empty where no model is loaded
    counters: dict[str, int]  # since the store was opened: hits, misses, damaged_<kind>, quarantined ...
    stale: list[str] | None = None  # collections of another model or other settings; None: no model is open


class StoreProblem(Reply, frozen=True, kw_only=True):
    kind: str  # missing | size | digest | mode | orphan | unused | index | database | recomputed | ...
    name: str  # of the file or collection
    detail: str
    repaired: bool = False


class StoreVerification(Reply, frozen=True, kw_only=True):
    full: bool  # every byte was read and checked
    kv_files: int  # of the whole store
    kv_bytes: int
    problems: list[StoreProblem]  # the first thousand
    seconds: float
    found: int = 0
    repaired: int = 0
    recomputed: int = 0  # chunks that were prefilled again and compared
    files: int = 0  # that were looked at
    bytes: int = 0
    files_left: int = 0  # for want of time: the next verification begins with them
    bytes_left: int = 0
    bytes_before: int = 0  # of blocks/, indexes/ and quarantine/
    bytes_after: int = 0


class StoreFile(Reply, frozen=True, kw_only=True):
    """One chunk's KV on disk."""

    key: str  # what it was made from: 64 hex digits
    collection: str  # that it was made for and counts against; empty: deleted since
    tokens: int
    bytes: int
    chunks: int  # that refer to it; a collection whose prefix it is counts as one; 0: gc removes it
    uses: int
    created_at: str
    used_at: str = ""  # for a question; told a minute late at most
    verified_at: str = ""  # when every byte was read last


class StoreReference(Reply, frozen=True, kw_only=True):
    collection: str
    document_id: str
    external_id: str
    ordinal: int  # of the chunk in its document


class StoreFileDetail(Reply, frozen=True, kw_only=True):
    file: StoreFile
    name: str  # within blocks/
    fingerprint: str
    references: list[StoreReference]  # the first hundred
    damage: StoreProblem | None = None  # every byte was read for this


class QuarantinedFile(Reply, frozen=True, kw_only=True):
    name: str
    kind: str
    detail: str
    time: str
    bytes: int


class Quarantine(Reply, frozen=True, kw_only=True):
    files: list[QuarantinedFile]
    bytes: int


class StoreChange(Reply, frozen=True, kw_only=True):
    """What was removed, after a kill since the job was taken up again; with `dry_run`, what would be."""

    dry_run: bool
    files: int
    bytes: int
    bytes_before: int  # of blocks/, indexes/ and quarantine/, or of the database where that was compacted
    bytes_after: int
    failed: int = 0  # files that could not be removed


class ChangeWork(Reply, frozen=True, kw_only=True):
    """The job that removes something; `change` is as foreseen, and the finished job's what it came to."""

    dry_run: bool
    change: StoreChange
    job: Job | None = None


class StoreWork(Reply, frozen=True, kw_only=True):
    """What a job will do; with `dry_run`, what it would."""

    dry_run: bool
    files: int  # to be read, or to be made
    tokens: int
    bytes: int
    bytes_before: int = 0  # of blocks/, indexes/ and quarantine/
    bytes_after: int = 0  # as foreseen; the finished job's `counts` have what it came to
    job: Job | None = None


class StoreVerify(Request, frozen=True, kw_only=True):
    full: bool = True  # read every byte; else sizes and modes only
    deep: Annotated[int, Meta(ge=0, le=1000)] = 0  # chunks to prefill again, by chance, and to compare
    max_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0  # then it ends, and says what is left; 0: no bound
    repair: bool = False
    dry_run: bool = False


class StoreGC(Request, frozen=True, kw_only=True):
    dry_run: bool = False
    force: bool = False  # although a large part of the store would go


class StoreEvict(Request, frozen=True, kw_only=True):
    collection: Name | None = None
    to_bytes: Annotated[int, Meta(ge=0, le=2**53)] = 0  # what may stay
    dry_run: bool = False


class StorePurge(Request, frozen=True, kw_only=True):
    dry_run: bool = False


class StoreCompact(Request, frozen=True, kw_only=True):
    dry_run: bool = False


class StoreCollection(Request, frozen=True, kw_only=True):
    """Of `warm` and `reprefill`."""

    collection: Name
    dry_run: bool = False


class Snapshot(Reply, frozen=True, kw_only=True):
    """The store as it was at one moment; block files are shared with it, not copied."""

    id: str
    time: str
    store_id: str
    dialect: str
    generation: int
    kv_files: int
    kv_bytes: int
    database_bytes: int
    database_digest: str = ""  # xxh3-128 of the database's copy


class SnapshotRestore(Request, frozen=True, kw_only=True):
    dry_run: bool = False  # only look whether it can be restored


class SnapshotWork(Reply, frozen=True, kw_only=True):
    """The snapshot that a job makes, with an empty `id` until it is done, or brings the store back to; with
    `dry_run`, could.
    """

    dry_run: bool
    snapshot: Snapshot
    job: Job | None = None


class SnapshotList(Reply, frozen=True, kw_only=True):
    data: list[Snapshot]


class SnapshotCreate(Request, frozen=True, kw_only=True):
    dry_run: bool = False  # only tell what it would keep; the reply's `id` is empty


class ArchiveFile(Reply, frozen=True, kw_only=True):
    """An archive of collections in the server's `archives/`."""

    name: str
    bytes: int
    time: str  # when it was last written


class ArchiveList(Reply, frozen=True, kw_only=True):
    data: list[ArchiveFile]


class StoreExport(Request, frozen=True, kw_only=True):
    archive: ArchiveName  # a new file in `archives/` of the server's data directory
    collections: Annotated[list[Name], Meta(max_length=1000)] = []  # none: all
    kv: bool = False  # their block files, too
    dry_run: bool = False


class StoreImport(Request, frozen=True, kw_only=True):
    archive: ArchiveName  # a file in `archives/` of the server's data directory
    kv: bool = False  # take its block files: their values are on the word of who made it
    dry_run: bool = False  # the job only checks the archive, and tells what is in it


class Exported(Reply, frozen=True, kw_only=True):
    """What an archive holds; with `dry_run`, would, but that `bytes` are those of vectors and KV alone."""

    path: str
    collections: list[str]
    documents: int
    vectors: int
    kv_files: int
    bytes: int
    dry_run: bool = False


class Imported(Reply, frozen=True, kw_only=True):
    """What an archive brought; with `dry_run`, what it would."""

    collections: list[str]
    documents: int = 0
    failed: int = 0  # that could not be made ready; `memkv documents list --status failed` says why
    vectors_taken: int = 0  # from the archive, rather than computed here
    kv_taken: int = 0  # block files
    bytes_before: int = 0  # of blocks/, indexes/ and quarantine/
    bytes_after: int = 0
    dry_run: bool = False


class ArchiveWork(Reply, frozen=True, kw_only=True):
    """The job that writes or reads an archive; `exported` and `imported` tell what is known of it so far."""

    dry_run: bool
    job: Job | None = None
    exported: Exported | None = None
    imported: Imported | None = None


# Access keys


class AccessKeyCreate(Request, frozen=True, kw_only=True):
    name: KeyLabel = ""  # for people
    scope: Scope = "read"
    collections: CollectionNames | None = None  # that it is for; None: every collection
    expires_in: ExpirySeconds = 0  # seconds from now; 0: never


class AccessKeyPatch(Request, frozen=True, kw_only=True):
    """What of a key can be changed; None leaves it as it is."""

    name: KeyLabel | None = None
    scope: Scope | None = None
    collections: CollectionNames | None = None
    expires_in: ExpirySeconds | None = None
    force: bool = False  # although no valid key of scope admin would be left


class AccessKey(Reply, frozen=True, kw_only=True):
    """Who holds its secret may ask for what its scope allows: `admin` everything, `write` also what `read`
    does."""

    id: str
    name: str
    prefix: str  # the secret begins with it
    scope: Scope
    collections: list[str] | None  # that it is for; None: every collection
    status: Literal["valid", "expired", "revoked"]
    created_at: str
    expires_at: str = ""
    revoked_at: str = ""
    notes: list[str] = []  # what whoever changed it should know


class NewAccessKey(AccessKey, frozen=True, kw_only=True):
    """The only reply that holds a secret. Its `repr` does not."""

    secret: str

    def __repr__(self) -> str:
        return f"NewAccessKey(id={self.id!r}, prefix={self.prefix!r}, scope={self.scope!r})"
