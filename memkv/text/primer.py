"""Documents that stand at the head of every prompt, in front of the retrieved ones.

A chunk that was prefilled with no document before it takes itself for the first, and draws attention as a
first document does; several of them mapped into one prompt disturb each other. Behind these documents every
chunk is a later one, as it will be where it is mapped. They are part of the prefix: prefilled once, mapped
always, and the same in a full prefill. What they say is common knowledge, so that an answer that
leans on them is not wrong.
"""

from __future__ import annotations

from importlib.resources import files

from memkv.text.prompt import chunk_label, chunk_piece

NUM_DOCUMENTS = 8


def primer_text(num_documents: int) -> str:
    """The first so many of the documents in `primer.md`, each as a chunk stands in a prompt."""
    source = files("memkv.text").joinpath("primer.md").read_text(encoding="utf-8")
    documents = [document.partition("\n") for document in source.removeprefix("# ").split("\n# ")]
    assert len(documents) == NUM_DOCUMENTS, "bug: primer.md has other documents"
    return "".join(
        chunk_piece(chunk_label(title), " ".join(text.split()))
        for title, _, text in documents[:num_documents]
    )
