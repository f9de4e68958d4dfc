"""From a question to the chunks that may answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memkv.memory.collections import OpenCollection
from memkv.memory.parts import Parts
from memkv.memory.replies import metadata_reply
from memkv.store.rows import ChunkRow
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
        return [_retrieved(hit) for hit in hits]


def _retrieved(hit: SearchHit) -> Retrieved:
    chunk, document = hit.chunk, hit.document
    return Retrieved(
        chunk=chunk,
        reply=RetrievedChunk(
            chunk_id=chunk.id,
            document_id=document.id,
            external_id=document.external_id,
            title=document.title,
            score=hit.score,
            text=chunk.text,
            start=chunk.start,
            end=chunk.end,
            tokens=len(chunk.token_ids),
            metadata=metadata_reply(document.metadata),
        ),
    )
