"""What a search reads: which chunks may be found, and the rows of those that were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import InstrumentedAttribute

from memkv.store.catalog_chunks import CHUNK_COLUMNS
from memkv.store.catalog_documents import DOCUMENT_COLUMNS
from memkv.store.catalog_files import in_batches
from memkv.store.catalog_filters import filter_clause
from memkv.store.filters import Filter
from memkv.store.rows import ChunkRow, DocumentRow, FoundChunk
from memkv.store.statements import Statements
from memkv.store.tables import Chunk, Document

T = TypeVar("T", int, str)


class SearchStatements(Statements):
    """Its methods raise DatabaseUnavailable and DatabaseDamaged."""

    def row_ids_matching(self, tenant: str, collection_id: str, matching: Filter) -> NDArray[np.int64]:
        """Row ids of the chunks whose document matches the filter, ascending."""
        statement = (
            select(Chunk.row_id)
            .join(Document, Document.id == Chunk.document_id)
            .where(
                Chunk.tenant == tenant,
                Chunk.collection_id == collection_id,
                filter_clause(matching, collection_id),
            )
            .order_by(Chunk.row_id)
        )
        with self._database.read() as connection:
            return np.array(connection.execute(statement).scalars().all(), dtype=np.int64)

    def chunks_by_row_ids(
        self, tenant: str, collection_id: str, row_ids: Sequence[int]
    ) -> dict[int, FoundChunk]:
        """The chunks among `row_ids` that are there now, with their documents, by row id.

        The vector index may still hold rows that were deleted: what is not found here was.
        """
        found = self._chunks(tenant, collection_id, Chunk.row_id, row_ids)
        return {each.chunk.row_id: each for each in found}

    def chunks_by_ids(self, tenant: str, collection_id: str, ids: Sequence[str]) -> dict[str, FoundChunk]:
        """The chunks among `ids` that are there now, with their documents, by id."""
        return {each.chunk.id: each for each in self._chunks(tenant, collection_id, Chunk.id, ids)}

    def _chunks(
        self, tenant: str, collection_id: str, column: InstrumentedAttribute[T], values: Sequence[T]
    ) -> list[FoundChunk]:
        found: list[FoundChunk] = []
        width = len(CHUNK_COLUMNS)
        with self._database.read() as connection:
            for batch in in_batches(values):
                statement = (
                    select(*CHUNK_COLUMNS, *DOCUMENT_COLUMNS)
                    .join(Document, Document.id == Chunk.document_id)
                    .where(
                        Chunk.tenant == tenant,
                        Chunk.collection_id == collection_id,
                        column.in_(batch),
                    )
                )
                for row in connection.execute(statement):
                    columns = tuple(row)
                    found.append(FoundChunk(ChunkRow(*columns[:width]), DocumentRow(*columns[width:])))
        return found
