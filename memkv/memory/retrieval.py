"""From a question to the chunks that may answer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memkv.errors import ChunkNotFound
from memkv.memory.collections import OpenCollection
from memkv.memory.parts import Parts
from memkv.memory.replies import metadata_reply
from memkv.store.rows import ChunkRow, FoundChunk
from memkv.store.search import SearchHit
from memkv.wire import RetrievedChunk


@dataclass(frozen=True, slots=True)
class Retrieved:
    chunk: ChunkRow
    reply: RetrievedChunk


class Retrieval:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def search(
        self,
        collection: OpenCollection,
        query: str,
        top_k: int | None,
        matching: Mapping[str, object] | None,
        min_score: float | None,
    ) -> list[Retrieved]:
        """The chunks nearest to the question, best first. Raises `FilterError`."""
        config = self._parts.config.query
        vector = self._parts.embedder.embed_query(query)
        hits = self._parts.store.search(
            collection.row,
            vector,
            top_k if top_k is not None else config.top_k,
            filter=matching,
            min_score=min_score if min_score is not None else config.min_score,
        )
        return [_retrieved(hit, hit.score) for hit in hits]

    def recall(self, collection: OpenCollection, ids: Sequence[str]) -> dict[str, Retrieved]:
        """Chunks that were found earlier, by id; their scores are 0. Raises `ChunkNotFound`."""
        row = collection.row
        found = self._parts.store.catalog.chunks_by_ids(row.tenant, row.id, ids)
        missing = next((chunk_id for chunk_id in ids if chunk_id not in found), None)
        if missing is not None:
            raise ChunkNotFound(f"collection {row.name!r} has no chunk {missing!r}")
        return {chunk_id: _retrieved(each, 0.0) for chunk_id, each in found.items()}


def _retrieved(found: SearchHit | FoundChunk, score: float) -> Retrieved:
    chunk, document = found.chunk, found.document
    return Retrieved(
        chunk=chunk,
        reply=RetrievedChunk(
            chunk_id=chunk.id,
            document_id=document.id,
            external_id=document.external_id,
            title=document.title,
            score=score,
            text=chunk.text,
            start=chunk.start,
            end=chunk.end,
            tokens=len(chunk.token_ids),
            metadata=metadata_reply(document.metadata),
        ),
    )
