"""What stands in a conversation's prompt before the question now asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memkv.engine.request import Piece
from memkv.engine.residency import ChunkRef
from memkv.memory.collections import OpenCollection
from memkv.memory.retrieval import Retrieval, Retrieved
from memkv.store.rows import ChunkRow
from memkv.wire import Message

Part = Retrieved | tuple[int, ...]  # a chunk, or the token ids of a text


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns that were answered: chunks | question, answer | chunks | question, answer ..."""

    parts: tuple[Part, ...]

    @property
    def chunks(self) -> list[Retrieved]:
        """Those among the parts; each text once."""
        return [part for part in self.parts if isinstance(part, Retrieved)]

    @property
    def num_tokens(self) -> int:
        return sum(len(part.chunk.token_ids if isinstance(part, Retrieved) else part) for part in self.parts)

    def new_among(self, found: Sequence[Retrieved]) -> list[Retrieved]:
        """Those whose text does not stand in it."""
        known = {hit.chunk.input_key for hit in self.chunks}
        return [hit for hit in found if hit.chunk.input_key not in known]


def recall(collection: OpenCollection, retrieval: Retrieval, messages: Sequence[Message]) -> Conversation:
    """The conversation of these messages: questions and answers in turn, the last one an answer.

    Raises:
        ChunkNotFound: a chunk is not in the collection, or not any more.
        BadRequestError: the model's chat template has no place for answers.
    """
    questions, answers = messages[::2], messages[1::2]
    ids = [chunk_id for question in questions for chunk_id in question.chunk_ids]
    found = retrieval.recall(collection, ids)
    template = collection.template
    parts: list[Part] = []
    known: set[str] = set()
    for question, answer in zip(questions, answers, strict=True):
        for hit in (found[chunk_id] for chunk_id in question.chunk_ids):
            if hit.chunk.input_key not in known:
                known.add(hit.chunk.input_key)
                parts.append(hit)
        parts.append((*template.tail_ids(question.content), *template.turn_ids(answer.content)))
    return Conversation(tuple(parts))


def pieces_of(collection: OpenCollection, parts: Sequence[Part]) -> tuple[Piece, ...]:
    """Parts as the engine takes them; a chunk knows which of the others stands before it in its document."""
    chunks = [part.chunk for part in parts if isinstance(part, Retrieved)]
    keys = {(chunk.document_id, chunk.ordinal): chunk.input_key for chunk in chunks}

    def ref(chunk: ChunkRow) -> ChunkRef:
        before = keys.get((chunk.document_id, chunk.ordinal - 1), "")
        return replace(collection.ref(chunk.input_key, chunk.token_ids), after=before)

    return tuple(ref(part.chunk) if isinstance(part, Retrieved) else part for part in parts)
