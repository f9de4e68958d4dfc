"""Worked examples that stand at the head of every prompt: documents, a question, its answer.

A chunk that was prefilled with no document before it takes itself for the first, and draws attention as a
first document does; several of them mapped into one prompt disturb each other. Behind these examples every
chunk is a later one, as it will be where it is mapped. They are part of the prefix: prefilled once, mapped
always, the same in a full prefill; and they show the model what an answer looks like. What they say is common
knowledge, so that an answer that leans on them is not wrong.
"""

from __future__ import annotations

from importlib.resources import files

from memkv.text.prompt import WorkedExample


def worked_examples() -> tuple[WorkedExample, ...]:
    """Those of `examples.md`."""
    source = files("memkv.text").joinpath("examples.md").read_text(encoding="utf-8")
    return tuple(_example(text) for text in source.removeprefix("# ").split("\n# "))


def _example(text: str) -> WorkedExample:
    question, *sections = text.split("\n## ")
    parts = [section.partition("\n") for section in sections]
    *documents, (last, _, answer) = [(title, "", " ".join(body.split())) for title, _, body in parts]
    assert last == "Answer", "bug: an example ends with its answer"
    return WorkedExample(tuple((title, body) for title, _, body in documents), question.strip(), answer)
