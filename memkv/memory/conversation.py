"""What stands in a conversation's prompt before the question now asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memkv.memory.collections import OpenCollection
from memkv.memory.retrieval import Retrieval, Retrieved
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
