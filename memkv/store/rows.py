"""What the catalog takes and returns: plain frozen data, never a live database object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from memkv.errors import BadRequestError

DEFAULT_TENANT = "default"

DocumentStatus = Literal["pending", "ready", "failed"]
JobStatus = Literal["queued", "running", "succeeded", "partial", "failed", "cancelled"]
Outcome = Literal["created", "unchanged", "updated"]
Problem = Mapping[str, object]  # a problem document: at least `code` and `detail`

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A slice of a list that is ordered by id.

    `after` gives the rows that follow that id in `order`; `before` the nearest rows that precede it.
    Raises `BadRequestError` on a limit outside 1..100 or an order that is not known.
    """

    limit: int = 20
    order: Literal["asc", "desc"] = "asc"
    after: str | None = None
    before: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= 100:
            raise BadRequestError(f"limit is {self.limit}", hint="1 to 100")
        if self.order not in ("asc", "desc"):
            raise BadRequestError(f"order {str(self.order)[:32]!r} is not known", hint="asc or desc")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    rows: tuple[Row, ...]
    has_more: bool  # in the direction that was asked for


@dataclass(frozen=True, slots=True)
class NewAccessKey:
    name: str  # for people
    scope: Literal["read", "write", "admin"]
    collections: tuple[str, ...] | None  # names; None: every collection
    expires_at: datetime | None  # None: never


@dataclass(frozen=True, slots=True)
class AccessKeyRow:
    """Without its secret, of which only a digest is stored."""

    id: str
    name: str
    prefix: str  # of the secret, for people
    scope: Literal["read", "write", "admin"]
    collections: tuple[str, ...] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class KeptKey(AccessKeyRow):
    """With what its secret is found by."""

    digest: str


@dataclass(frozen=True, slots=True)
class GateRow:
    """What a policy cost on tasks of one kind.

    Attributes:
        data: what was asked.
        chunk_tokens: of the largest chunks.
        length: tokens of all chunks of a prompt.
        fresh: share of the chunks' tokens that were computed for a question.
        dnll_high: upper end of the 95 % interval of what it adds to the gold answer's negative
            log-likelihood, in nats a token, against a full prefill.
        accuracy_full: how often a full prefill answers these tasks; 1 where answers are free text.
    """

    data: str
    chunk_tokens: int
    length: int
    kind: str
    policy: str
    questions: int
    fresh: float
    dnll_high: float
    accuracy_full: float = 1.0


@dataclass(frozen=True, slots=True)
class NewCollection:
    name: str
    fingerprint_digest: str  # 64 hex digits
    fingerprint_json: str
    embedder_name: str
    embedder_digest: str
    dim: int  # of the embedding vectors
    max_chunk_tokens: int
    block_size: int
    prefill: str  # eager | on_first_use
    system_prompt: str
    prefix_ids: tuple[int, ...]
    primer: bool = False  # whether the prefix ends with the primer
    description: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)
    model_name: str = ""
    max_kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CollectionRow:
    id: str
    tenant: str
    name: str
    description: str
    metadata: Mapping[str, object]
    fingerprint_digest: str
    fingerprint_json: str
    embedder_name: str
    embedder_digest: str
    dim: int
    max_chunk_tokens: int
    block_size: int
    prefill: str
    system_prompt: str
    prefix_ids: tuple[int, ...]
    prefix_key: str  # the input key of the prefix's own KV
    primer: bool
    generation: int  # grows with every change of the collection's vectors
    stamp: bytes  # 16 random bytes, new with every generation: tells a restored database from its future
    created_at: datetime
    model_name: str  # for people; the fingerprint decides
    max_kv_bytes: int  # of block files made for it; 0: no cap of its own


@dataclass(frozen=True, slots=True)
class NewDocument:
    text: str  # normalised
    external_id: str | None = None
    title: str = ""
    filename: str = ""
    media_type: str = "text/plain"
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A document without its text (`Catalog.document_text`).

    `revision` counts the texts accepted under this id. `status` speaks of the newest one: while it is
    pending, or after it failed, the chunks of the last ready revision stay searchable.
    """

    id: str
    tenant: str
    collection_id: str
    external_id: str
    title: str
    filename: str
    media_type: str
    metadata: Mapping[str, object]
    content_hash: str  # BLAKE2b-256 of the text, 64 hex digits
    text_bytes: int
    status: DocumentStatus
    revision: int
    error: Problem | None
    num_chunks: int  # of the last ready revision
    num_tokens: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class AcceptedDocument:
    document: DocumentRow
    outcome: Outcome
    job_id: str | None  # the job that will make it ready; None where nothing is left to do


@dataclass(frozen=True, slots=True)
class Accepted:
    documents: tuple[AcceptedDocument, ...]
    job: JobRow | None  # made by this call; None where every document was unchanged


@dataclass(frozen=True, slots=True, eq=False)
class NewChunk:
    ordinal: int
    start: int  # characters of the document's text
    end: int
    text: str
    label: str
    token_ids: tuple[int, ...]  # label included
    input_key: str
    embedding: NDArray[np.float32]  # [dim], unit length


@dataclass(frozen=True, slots=True)
class ChunkRow:
    row_id: int  # the vector index's id; never used twice
    id: str
    document_id: str
    ordinal: int
    start: int
    end: int
    text: str
    label: str
    token_ids: tuple[int, ...]
    input_key: str


@dataclass(frozen=True, slots=True)
class FoundChunk:
    chunk: ChunkRow
    document: DocumentRow


@dataclass(frozen=True, slots=True)
class KVFileRow:
    input_key: str
    tenant: str
    fingerprint_digest: str
    file_digest: str  # xxh3-128 of the whole file, 32 hex digits
    num_tokens: int
    num_bytes: int
    collection_id: str = ""  # that it was made for, and counts against; empty: not known


@dataclass(frozen=True, slots=True)
class FileState:
    """A block file as the database knows it."""

    file: KVFileRow
    collection: str  # name of the one it was made for; empty: deleted since
    chunks: int  # that refer to its key; a collection whose prefix it is counts as one
    uses: int
    created_at: datetime
    verified_at: datetime | None
    used_at: datetime | None


@dataclass(frozen=True, slots=True)
class KeyedChunk:
    """What the KV of a key is made of again."""

    collection_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """A chunk whose KV a file holds."""

    collection: str
    document_id: str
    external_id: str
    ordinal: int


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """All vectors of a collection, as of one generation."""

    generation: int
    stamp: bytes
    row_ids: NDArray[np.int64]  # [n]
    vectors: NDArray[np.float32]  # [n, dim]


@dataclass(frozen=True, slots=True)
class Released:
    """What nothing refers to any more.

    Attributes:
        keys: input keys of chunks and prefixes, whether or not a file holds their KV.
        files: rows dropped, whose files are to go.
    """

    keys: tuple[str, ...] = ()
    files: tuple[KVFileRow, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What one transaction did to a collection: the index and the block files follow it."""

    collection_id: str
    generation: int
    stamp: bytes
    removed: NDArray[np.int64]  # chunk row ids
    added: NDArray[np.int64]
    vectors: NDArray[np.float32]  # [len(added), dim]
    released: Released

    @classmethod
    def removal(
        cls,
        collection_id: str,
        generation: int,
        stamp: bytes,
        removed: NDArray[np.int64],
        released: Released,
    ) -> Change:
        none = np.empty(0, dtype=np.int64)
        return cls(
            collection_id, generation, stamp, removed, none, np.empty((0, 0), dtype=np.float32), released
        )


@dataclass(frozen=True, slots=True)
class Committed:
    """`superseded`: a newer text was accepted meanwhile; `deleted`: the document is gone. Nothing written."""

    outcome: Literal["ready", "superseded", "deleted"]
    change: Change | None


@dataclass(frozen=True, slots=True)
class DeletedCollection:
    collection_id: str
    documents: int
    chunks: int
    kv_files: int
    kv_bytes: int
    released: Released


@dataclass(frozen=True, slots=True)
class RenewedCollection:
    """All of its documents are pending again; `job` is None where it has none."""

    released: Released
    job: JobRow | None


@dataclass(frozen=True, slots=True)
class CollectionCounts:
    pending: int
    ready: int
    failed: int
    chunks: int
    tokens: int
    kv_files: int  # distinct keys of this collection that have KV, the prefix included
    kv_bytes: int

    @property
    def documents(self) -> int:
        return self.pending + self.ready + self.failed


@dataclass(frozen=True, slots=True)
class JobRow:
    id: str
    tenant: str
    collection_id: str
    kind: str
    status: JobStatus
    stage: str
    done: int
    total: int
    unit: str
    counts: Mapping[str, object]
    error: Problem | None
    attempts: int
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    arguments: Mapping[str, object] = field(default_factory=dict)
    owner: str | None = None  # that runs it
    heartbeat_at: datetime | None = None  # when that one was last heard of

    @property
    def is_finished(self) -> bool:
        return self.status not in ("queued", "running")


@dataclass(frozen=True, slots=True)
class JobItem:
    document_id: str
    status: Literal["queued", "running", "succeeded", "failed"]
    error: Problem | None
    text_bytes: int  # of the document's text; 0 where it is deleted
