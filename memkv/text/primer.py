"""Some documents that chunks are prefilled behind, so that none of them takes itself for the first.

A chunk that was prefilled with no document before it draws attention as a first document does; several of
them mapped into one prompt disturb each other. Behind a primer every chunk is a later one, as it will be
where it is mapped. What the primer says is common knowledge.

    none     chunk prefilled behind the prefix                 prompt: prefix, chunks, question
    stored   chunk prefilled behind the prefix and the primer  prompt: prefix, chunks, question
    prompt   chunk prefilled behind the prefix and the primer  prompt: prefix, primer, chunks, question
"""

from __future__ import annotations

from typing import Literal

from memkv.text.examples import worked_examples
from memkv.text.prompt import PromptTokenizer, chunk_label, chunk_piece

Primer = Literal["none", "stored", "prompt"]


def primer_ids(tokenizer: PromptTokenizer, count: int = 8) -> tuple[int, ...]:
    """The tokens of the first `count` documents, each as a chunk stands in a prompt."""
    documents = [document for example in worked_examples() for document in example.documents][:count]
    pieces = [chunk_piece(chunk_label(title), text) for title, text in documents]
    return tuple(token for piece in pieces for token in tokenizer.encode(piece))
