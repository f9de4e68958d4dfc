"""Some documents that chunks are prefilled behind, so that none of them takes itself for the first.

A chunk that was prefilled with no document before it draws attention as a first document does; several of
them mapped into one prompt disturb each other. Behind a primer every chunk is a later one, as it will be
where it is mapped. The primer is a part of the prefix: prefilled once, mapped always, the same in a full
prefill. What it says is common knowledge, so that an answer that leans on it is not wrong.
"""

from __future__ import annotations

from importlib.resources import files

from memkv.text.prompt import PromptTokenizer, chunk_label, chunk_piece


def primer_ids(tokenizer: PromptTokenizer, count: int | None = None) -> tuple[int, ...]:
    """The tokens of the first `count` documents of `primer.md`, or of all, each as a chunk stands there."""
    source = files("memkv.text").joinpath("primer.md").read_text(encoding="utf-8")
    parts = [document.partition("\n") for document in source.removeprefix("## ").split("\n## ")]
    pieces = [chunk_piece(chunk_label(title), " ".join(body.split())) for title, _, body in parts[:count]]
    return tuple(token for piece in pieces for token in tokenizer.encode(piece))
