"""Statements about chunks: swapping a document's, listing them, reading vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, delete, insert, select, update

from memkv.store.catalog_collections import advance_collection
from memkv.store.catalog_files import release
from memkv.store.catalog_store import now
from memkv.store.database_errors import damaged
from memkv.store.ids import new_id
from memkv.store.paging import read_page
from memkv.store.rows import Change, ChunkRow, Committed, NewChunk, Page, PageRequest, Vectors
from memkv.store.statements import Statements
from memkv.store.tables import Chunk, Collection, Document

VECTOR_TYPE = np.dtype("<f4")

CHUNK_COLUMNS = (
    Chunk.row_id,
    Chunk.id,
    Chunk.document_id,
    Chunk.ordinal,
    Chunk.span_start,
    Chunk.span_end,
    Chunk.text,
    Chunk.label,
    Chunk.token_ids,
    Chunk.input_key,
)


class ChunkStatements(Statements):
    def commit_document(
        self, tenant: str, document_id: str, revision: int, chunks: Sequence[NewChunk]
    ) -> Committed:
        """Swaps the document's chunks for `chunks` and makes it ready, in one transaction.

        Writes nothing where the document is gone or `revision` is not its newest. Keys that only the old
        chunks referred to lose their file's row: `Change.released` names them.
        """
        with self._database.write() as transaction:
            connection = transaction.connection
            found = connection.execute(
                select(Document.collection_id, Document.revision, Collection.dim)
                .join(Collection, Collection.id == Document.collection_id)
                .where(Document.tenant == tenant, Document.id == document_id)
            ).first()
            if found is None:
                return Committed("deleted", None)
            if found.revision != revision:
                return Committed("superseded", None)
            vectors = _stack([chunk.embedding for chunk in chunks], found.dim)
            removed = remove_chunks(connection, tenant, document_id)
            added = _insert(connection, tenant, found.collection_id, document_id, chunks, vectors)
            connection.execute(
                update(Document)
                .where(Document.id == document_id)
                .values(
                    status="ready",
                    error=None,
                    num_chunks=len(chunks),
                    num_tokens=sum(len(chunk.token_ids) for chunk in chunks),
                    updated_at=now(),
                )
            )
            generation, stamp = advance_collection(connection, found.collection_id)
            released = release(connection, tenant, removed.keys)
        change = Change(found.collection_id, generation, stamp, removed.row_ids, added, vectors, released)
        return Committed("ready", change)

    def list_chunks(
        self, tenant: str, collection_id: str, document_id: str, page: PageRequest
    ) -> Page[ChunkRow]:
        statement = select(*CHUNK_COLUMNS).where(
            Chunk.tenant == tenant, Chunk.collection_id == collection_id, Chunk.document_id == document_id
        )
        with self._database.read() as connection:
            return read_page(connection, statement, page, order_by=Chunk.id, make=ChunkRow)

    def chunks_of(self, tenant: str, document_id: str) -> list[ChunkRow]:
        """A document's chunks, in order."""
        statement = select(*CHUNK_COLUMNS).where(Chunk.tenant == tenant, Chunk.document_id == document_id)
        with self._database.read() as connection:
            rows = connection.execute(statement.order_by(Chunk.ordinal)).all()
        return [ChunkRow(*tuple(row)) for row in rows]

    def document_vectors(
        self, tenant: str, document_id: str
    ) -> tuple[list[tuple[int, int]], NDArray[np.float32]]:
        """Of a document's chunks, in order: their spans in its text, and their vectors [chunks, dim]."""
        statement = select(Chunk.span_start, Chunk.span_end, Chunk.embedding)
        with self._database.read() as connection:
            rows = connection.execute(
                statement.where(Chunk.tenant == tenant, Chunk.document_id == document_id).order_by(
                    Chunk.ordinal
                )
            ).all()
        vectors = [np.frombuffer(row.embedding, dtype=VECTOR_TYPE) for row in rows]
        return [(row.span_start, row.span_end) for row in rows], np.array(vectors, dtype=np.float32)

    def collection_state(self, tenant: str, collection_id: str) -> tuple[int, bytes] | None:
        """Generation and stamp; None where the collection is gone."""
        with self._database.read() as connection:
            return _state(connection, tenant, collection_id)

    def vectors(self, tenant: str, collection_id: str) -> Vectors | None:
        """Every vector of the collection, in one snapshot; None where the collection is gone."""
        with self._database.read() as connection:
            state = _state(connection, tenant, collection_id)
            if state is None:
                return None
            dim = connection.execute(
                select(Collection.dim).where(Collection.id == collection_id)
            ).scalar_one()
            rows = connection.execute(
                select(Chunk.row_id, Chunk.embedding)
                .where(Chunk.tenant == tenant, Chunk.collection_id == collection_id)
                .order_by(Chunk.row_id)
            ).all()
        data = b"".join(row.embedding for row in rows)
        if len(data) != len(rows) * dim * VECTOR_TYPE.itemsize:
            raise damaged("a vector has a wrong length")
        values = np.frombuffer(data, dtype=VECTOR_TYPE).astype(np.float32, copy=False)
        ids = np.array([row.row_id for row in rows], dtype=np.int64)
        return Vectors(*state, row_ids=ids, vectors=values.reshape(len(rows), dim))


@dataclass(frozen=True, slots=True)
class RemovedChunks:
    row_ids: NDArray[np.int64]
    keys: tuple[str, ...]


def remove_chunks(connection: Connection, tenant: str, document_id: str) -> RemovedChunks:
    own = (Chunk.tenant == tenant, Chunk.document_id == document_id)
    rows = connection.execute(select(Chunk.row_id, Chunk.input_key).where(*own)).all()
    connection.execute(delete(Chunk).where(*own))
    return RemovedChunks(
        np.array([row.row_id for row in rows], dtype=np.int64), tuple(row.input_key for row in rows)
    )


def _insert(
    connection: Connection,
    tenant: str,
    collection_id: str,
    document_id: str,
    chunks: Sequence[NewChunk],
    vectors: NDArray[np.float32],
) -> NDArray[np.int64]:
    if not chunks:
        return np.empty(0, dtype=np.int64)
    statement = insert(Chunk).returning(Chunk.row_id, sort_by_parameter_order=True)
    rows = [
        {
            "id": new_id("chk"),
            "tenant": tenant,
            "collection_id": collection_id,
            "document_id": document_id,
            "ordinal": chunk.ordinal,
            "span_start": chunk.start,
            "span_end": chunk.end,
            "text": chunk.text,
            "label": chunk.label,
            "token_ids": chunk.token_ids,
            "input_key": chunk.input_key,
            "embedding": vector.astype(VECTOR_TYPE, copy=False).tobytes(),
        }
        for chunk, vector in zip(chunks, vectors, strict=True)
    ]
    return np.array(connection.execute(statement, rows).scalars().all(), dtype=np.int64)


def _stack(embeddings: Sequence[NDArray[np.float32]], dim: int) -> NDArray[np.float32]:
    if not embeddings:
        return np.empty((0, dim), dtype=np.float32)
    stacked = np.stack(embeddings).astype(np.float32, copy=False)
    assert stacked.shape == (len(embeddings), dim), "bug: embeddings of another dimension"
    assert np.isfinite(stacked).all(), "bug: an embedding is not finite"
    return stacked


def _state(connection: Connection, tenant: str, collection_id: str) -> tuple[int, bytes] | None:
    row = connection.execute(
        select(Collection.generation, Collection.stamp).where(
            Collection.tenant == tenant, Collection.id == collection_id
        )
    ).first()
    return None if row is None else (row.generation, row.stamp)
