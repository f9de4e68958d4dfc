"""A task as a prompt: its contexts among distractors, cut into chunks, in the order that a server would use.

prefix | chunk chunk ... chunk            | question, answer's beginning | gold answer
         own contexts and distractors,      as a server asks               what is scored
         `length` tokens together
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from memkv.engine.residency import ChunkRef
from memkv.errors import BadRequestError
from memkv.eval.tasks import Task
from memkv.kv.fingerprint import token_digest
from memkv.text.chunker import chunk_text
from memkv.text.embedder import Embedder, Vectors
from memkv.text.primer import primer_ids
from memkv.text.prompt import PromptTemplate
from memkv.text.tokenizer import TextTokenizer

Order = Literal["retrieved", "shuffled"]
Primer = Literal["none", "stored", "prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task, ready for the engine. `gold_ids` stand behind `tail_ids`."""

    task: Task
    chunks: tuple[ChunkRef, ...]
    tail_ids: tuple[int, ...]
    gold_ids: tuple[int, ...]

    @property
    def chunk_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts are made.

    Attributes:
        length: tokens of all chunks together; a task's own may be more.
        chunk_tokens: at most, in one chunk.
        order: "retrieved" takes the distractors that are most like the question and puts the most similar
            chunk first, as a server does; "shuffled" draws both.
        gold_tokens: of a longer answer, so many are scored.
        system_prompt: of the collection; empty: the default one.
        primer: "prompt" puts the primer at the end of the prefix; "stored" puts it there while chunks are
            prefilled, and leaves it out of prompts.
        primer_documents: how many of the primer's documents.
    """

    length: int = 4096
    chunk_tokens: int = 256
    order: Order = "retrieved"
    gold_tokens: int = 64
    system_prompt: str = ""
    primer: Primer = "none"
    primer_documents: int = 8
    seed: int = 0


class PromptMaker:
    """Makes prompts of tasks that serve each other as distractors.

    Args:
        embedder: orders chunks; not used where they are shuffled.
        room: the most tokens of a prompt and its gold answer.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenizer: TextTokenizer,
        template: PromptTemplate,
        embedder: Embedder,
        form: Form,
        room: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._embedder = embedder
        self._form = form
        self._room = room
        primer = primer_ids(tokenizer, form.primer_documents)
        if form.primer == "prompt":
            self._template = template = template.with_primer(primer)
        self._context_ids = (*template.prefix_ids, *(primer if form.primer == "stored" else ()))
        self._chunks: dict[tuple[int, ...], int] = {}  # token ids -> row
        self._rows_of: dict[str, list[int]] = {}  # context -> rows
        texts: list[str] = []
        texts_of = (text for task in tasks for text in (*task.contexts, *(task.distractors or ())))
        for context in dict.fromkeys(texts_of):
            rows = self._rows_of[context] = []
            for chunk in chunk_text(context, "", tokenizer, form.chunk_tokens):
                if chunk.token_ids not in self._chunks:
                    self._chunks[chunk.token_ids] = len(texts)
                    texts.append(chunk.text)
                rows.append(self._chunks[chunk.token_ids])
        self._ids = list(self._chunks)
        self._shared = self._rows(context for task in tasks for context in task.contexts)
        self._vectors: Vectors | None = embedder.embed(texts) if form.order == "retrieved" else None

    @property
    def prefix(self) -> ChunkRef:
        """What stands in front of the chunks in a prompt."""
        return self._ref((), self._template.prefix_ids)

    @property
    def context(self) -> ChunkRef:
        """What chunks are prefilled behind."""
        return self._ref((), self._context_ids)

    def make(self, task: Task) -> Prompt:
        """Raises `BadRequestError` where the task exceeds the room."""
        own = self._rows(task.contexts)
        others = self._shared if task.distractors is None else self._rows(task.distractors)
        ranked = self._ranked(task, own + [row for row in others if row not in set(own)])
        taken = set(own)
        room = self._form.length - sum(len(self._ids[row]) for row in own)
        for row in ranked:
            if row not in taken and len(self._ids[row]) <= room:
                taken.add(row)
                room -= len(self._ids[row])
        prompt = self._prompt(task, [row for row in ranked if row in taken])
        total = len(self._template.prefix_ids) + prompt.chunk_tokens
        total += len(prompt.tail_ids) + len(prompt.gold_ids)
        if total > self._room:
            raise BadRequestError(
                f"task {task.id} takes {total} tokens; the model's context has room for {self._room}",
                hint="lower --length or --answers, or leave the task out",
            )
        return prompt

    def _rows(self, contexts: Iterable[str]) -> list[int]:
        return list(dict.fromkeys(row for context in contexts for row in self._rows_of[context]))

    def _ranked(self, task: Task, rows: list[int]) -> list[int]:
        """By likeness to the question, or drawn."""
        if self._vectors is not None:
            likeness = self._vectors[rows] @ self._embedder.embed_query(task.question)
            return [rows[int(place)] for place in np.argsort(-likeness, kind="stable")]
        random.Random(f"{task.id} {self._form.seed}").shuffle(rows)
        return rows

    def _prompt(self, task: Task, rows: Iterable[int]) -> Prompt:
        encode = self._tokenizer.encode
        tail = self._template.tail_ids(task.question)
        gold = task.answers[0]
        if task.answer_start:
            tail = [*tail, *encode(task.answer_start)]
            gold = f" {gold}"
        return Prompt(
            task=task,
            chunks=tuple(self._ref(self._context_ids, self._ids[row]) for row in rows),
            tail_ids=tuple(tail),
            gold_ids=tuple(encode(gold)[: self._form.gold_tokens]),
        )

    @staticmethod
    def _ref(context: Sequence[int], ids: Sequence[int]) -> ChunkRef:
        return ChunkRef(token_digest(context, ids).hex(), tuple(context), tuple(ids))
