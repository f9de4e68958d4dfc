"""Finding chunks: FAISS proposes, SQL decides what is there and may be seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memkv.errors import BadRequestError
from memkv.store.catalog import Catalog
from memkv.store.filters import Filter
from memkv.store.rows import ChunkRow, CollectionRow, DocumentRow
from memkv.store.vector_index import VectorIndexes


@dataclass(frozen=True, slots=True)
class SearchHit:
    chunk: ChunkRow
    document: DocumentRow
    score: float  # inner product of unit vectors: -1 to 1


def search_collection(
    catalog: Catalog,
    indexes: VectorIndexes,
    collection: CollectionRow,
    vector: NDArray[np.float32],
    k: int,
    *,
    matching: Filter | None = None,
    min_score: float | None = None,
) -> list[SearchHit]:
    """The `k` chunks nearest to `vector` ([dim]), best first; fewer where fewer reach `min_score`.

    Only chunks of documents that match the filter are looked at, so that a narrow filter still fills `k`.

    Raises:
        BadRequestError: k is not positive, or the vector has another dimension or is not finite.
    """
    if k < 1:
        raise BadRequestError(f"k is {k}", hint="at least 1")
    if vector.shape != (collection.dim,) or not np.isfinite(vector).all():
        raise BadRequestError(
            f"the query's vector is not {collection.dim} finite numbers",
            hint="embed it with the collection's embedder",
        )
    index = indexes.get(collection)
    among = None
    if matching is not None:
        among = catalog.row_ids_matching(collection.tenant, collection.id, matching)
    asked = k
    while True:
        near = index.search(vector, asked, among=among)
        found = catalog.chunks_by_row_ids(collection.tenant, collection.id, near.row_ids.tolist())
        hits = [
            SearchHit(found[row_id].chunk, found[row_id].document, float(score))
            for row_id, score in zip(near.row_ids.tolist(), near.scores, strict=True)
            if row_id in found and (min_score is None or score >= min_score)
        ]
        # Rows that were deleted a moment ago may still stand in the index: look further behind them.
        if len(found) >= k or len(near.row_ids) < asked:
            return hits[:k]
        asked *= 2
