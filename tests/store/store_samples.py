"""Small collections, documents and KV for the store's tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memkv.kv.chunk import ChunkKV
from memkv.kv.fingerprint import input_key
from memkv.kv.layout import KVLayout
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.chunk_store import PublishItem
from memkv.store.rows import CollectionRow, Committed, DocumentRow, NewChunk, NewCollection, NewDocument
from memkv.store.verification import StoreProblem

OpenStore = Callable[..., Store]  # the `open_store` fixture

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=8, dtype="float32")
FINGERPRINT = "5a" * 32
PREFIX = (7, 8, 9)
DIM = 8


def new_collection(name: str = "papers", **changes: object) -> NewCollection:
    values: dict[str, object] = {
        "name": name,
        "fingerprint_digest": FINGERPRINT,
        "fingerprint_json": "{}",
        "embedder_name": "tiny",
        "embedder_digest": "00",
        "dim": DIM,
        "max_chunk_tokens": 64,
        "block_size": LAYOUT.block_size,
        "prefill": "eager",
        "system_prompt": "Answer.",
        "prefix_ids": PREFIX,
    }
    return NewCollection(**{**values, **changes})  # type: ignore[arg-type]


def tokens_of(text: str) -> tuple[int, ...]:
    """The same text gives the same tokens."""
    return tuple(text.encode())


def kv_of(tokens: Sequence[int], seed: int = 0) -> ChunkKV:
    """KV that says which tokens it was made of; another seed gives other bytes for the same tokens."""
    size = LAYOUT.bytes_for(len(tokens))
    return ChunkKV(LAYOUT, len(tokens), random.Random(repr((tuple(tokens), seed))).randbytes(size))


def vector_of(text: str) -> np.ndarray:
    """A unit vector, the same for the same text."""
    vector = np.random.default_rng(list(text.encode())).standard_normal(DIM).astype(np.float32)
    return vector / np.linalg.norm(vector)


@dataclass(frozen=True)
class Sample:
    """One chunk of a document, with everything that belongs to it."""

    text: str
    ordinal: int
    start: int
    item: PublishItem

    @property
    def chunk(self) -> NewChunk:
        return NewChunk(
            ordinal=self.ordinal,
            start=self.start,
            end=self.start + len(self.text),
            text=self.text,
            label="",
            token_ids=tuple(self.item.token_ids),
            input_key=self.item.input_key,
            embedding=vector_of(self.text),
        )


def samples_of(store: Store, text: str, *, tenant: str = DEFAULT_TENANT, seed: int = 0) -> list[Sample]:
    """The document's chunks: its lines."""
    secret = store.catalog.tenant_secret(tenant)
    found, start = [], 0
    for ordinal, line in enumerate(text.split("\n")):
        tokens = tokens_of(line)
        key = input_key(secret, FINGERPRINT, PREFIX, tokens)
        item = PublishItem(key, FINGERPRINT, PREFIX, tokens, kv_of(tokens, seed), tenant)
        found.append(Sample(line, ordinal, start, item))
        start += len(line) + 1
    return found


def ingest(
    store: Store,
    collection: CollectionRow,
    text: str,
    *,
    external_id: str | None = None,
    publish: bool = True,
    **fields: object,
) -> DocumentRow:
    """All of it: accept, publish, commit."""
    tenant = collection.tenant
    new = NewDocument(text, external_id=external_id, **fields)  # type: ignore[arg-type]
    accepted = store.accept_documents(tenant, collection.id, [new])
    document = accepted.documents[0].document
    if document.status != "ready":
        commit(store, document, text, publish=publish)
        assert accepted.job is not None
        store.jobs.finish(accepted.job.id, "succeeded")
    return store.catalog.get_document(tenant, collection.id, document.id)


def commit(store: Store, document: DocumentRow, text: str, *, publish: bool = True) -> Committed:
    samples = samples_of(store, text, tenant=document.tenant)
    if publish:
        store.chunks.publish([sample.item for sample in samples])
    return store.commit_document(
        document.tenant, document.id, document.revision, [sample.chunk for sample in samples]
    )


def load(store: Store, item: PublishItem) -> ChunkKV | None:
    return store.chunks.load(
        item.input_key,
        fingerprint_digest=item.fingerprint_digest,
        layout=item.kv.layout,
        context_ids=item.context_ids,
        token_ids=item.token_ids,
        tenant=item.tenant,
    )


def damages(store: Store) -> list[StoreProblem]:
    """What a full verification finds wrong with files that were published without a document, say."""
    return [problem for problem in store.verify(full=True) if problem.kind != "unused"]


def found_texts(store: Store, collection: CollectionRow, text: str, k: int = 100) -> list[str]:
    """What a search for `text` finds, best first."""
    fresh = store.catalog.get_collection(collection.tenant, collection.name)
    return [hit.chunk.text for hit in store.search(fresh, vector_of(text), k)]


def path_of(store: Store, item: PublishItem) -> Path:
    [path] = (store.data_dir / "blocks" / item.input_key[:2]).glob(f"{item.input_key}.*")
    return path


def quarantined(store: Store) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (store.data_dir / "quarantine").glob("*.json")]


def is_exact(store: Store, sample: Sample) -> bool:
    kv = load(store, sample.item)
    return kv is not None and bytes(kv.data) == bytes(sample.item.kv.data)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    rewrite(path, bytes(data))


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o400)
