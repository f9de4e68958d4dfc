"""The pieces of a prompt: prefix, chunks, tail. Each is tokenised apart, so that each can be reused apart.

    prefix   template head, system prompt, beginning of the user's turn      the same for a whole collection
    chunk    label, text                                                     the same wherever it is mapped
    tail     question, end of the turn, beginning of the answer              always fresh
    turn     an answer, its end, beginning of the user's next turn           in front of further chunks

    prefix | chunks | tail | turn | chunks | tail | turn | ...               a conversation

What a conversation's prompt adds to the one before it, it adds at the end, so that all of the former and its
answer can be reused. Where a template shows an earlier answer in another way than one that is to come (some
leave out what the model thought), it therefore stands as it was made.

Only the template's own text may hold control tokens; system prompt, chunks, questions and answers are plain
text. The empty line between two pieces is a line end of the first and one of the second: both at the end of a
piece would be one token, which running text never has there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from memkv.errors import BadRequestError

SYSTEM_PROMPT = (
    "You answer questions from the documents that you are given. "
    "Use only what the documents say, and answer in a few complete sentences. "
    "If they do not contain the answer, say that you do not know."
)
INSTRUCTION = "Read these documents. A question about them follows.\n"
MAX_TITLE = 80  # characters of a title that a label keeps


class PromptTokenizer(Protocol):
    """What is used of `TextTokenizer`."""

    @property
    def start_ids(self) -> list[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_template(self, text: str) -> list[int]: ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str | None: ...


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A chat template, rendered once and cut around the place where chunks and question go.

    Attributes:
        prefix_ids: everything in front of the first chunk.
        form: "chat", "chat without system role" (its text stands in the user's turn) or "plain".
    """

    prefix_ids: tuple[int, ...]
    form: str
    tokenizer: PromptTokenizer
    answer_start: str  # template text between question and answer
    around_answer: tuple[str, str] | None  # blanks in front of an earlier answer, template text behind it

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: PromptTokenizer,
        system_prompt: str = SYSTEM_PROMPT,
    ) -> PromptTemplate:
        """Renders the tokenizer's chat template; one that is missing or unusable gives a plain prompt."""
        system_prompt = system_prompt.strip()
        for form, messages in _conversations(system_prompt):
            rendered = tokenizer.render_chat(messages) if tokenizer.has_chat_template else None
            cut = _cut(rendered, messages) if rendered else None
            if cut:
                return cls._from_cut(tokenizer, system_prompt, form, cut)
        start = [*tokenizer.start_ids, *tokenizer.encode(_joined(system_prompt, INSTRUCTION))]
        return cls(tuple(start), "plain", tokenizer, "\nAnswer:", (" ", "\n"))

    @classmethod
    def _from_cut(
        cls, tokenizer: PromptTokenizer, system_prompt: str, form: str, cut: list[str]
    ) -> PromptTemplate:
        *heads, tail = cut
        texts = [system_prompt, INSTRUCTION] if len(heads) == 2 else [_joined(system_prompt, INSTRUCTION)]
        ids: list[int] = []
        for head, text in zip(heads, texts, strict=True):
            ids += tokenizer.encode_template(head) + tokenizer.encode(text)
        return cls(tuple(ids), form, tokenizer, tail, _around_answer(tokenizer, tail))

    def with_primer(self, ids: Sequence[int]) -> PromptTemplate:
        """The same with these tokens at the end of the prefix."""
        return replace(self, prefix_ids=(*self.prefix_ids, *ids))

    def tail_ids(self, question: str) -> list[int]:
        """Everything behind the last chunk, up to where the answer begins."""
        return self.tokenizer.encode(f"\nQuestion: {question.strip()}") + self._own_ids(self.answer_start)

    def turn_ids(self, answer: str) -> list[int]:
        """An answer as it was given, up to where the user's next turn begins.

        Some tokenizers decode an answer without the blank that its first token has: the template says whether
        one belongs there. Raises `BadRequestError` where the template shows no answers.
        """
        if self.around_answer is None:
            raise BadRequestError(
                "the model's chat template has no place for earlier answers", hint="ask each question alone"
            )
        blanks, behind = self.around_answer
        text = blanks + answer.lstrip(" ") if blanks else answer
        return self.tokenizer.encode(text) + self._own_ids(behind)

    def _own_ids(self, text: str) -> list[int]:
        """Of the template's own text."""
        return self.tokenizer.encode(text) if self.form == "plain" else self.tokenizer.encode_template(text)


def chunk_label(title: str) -> str:
    """One line that names a chunk's document: `Document: <title>`, or `Document:` where it has none."""
    title = " ".join("".join(char if char.isprintable() else " " for char in title).split())
    if len(title) > MAX_TITLE:
        title = title[: MAX_TITLE - 1].rstrip() + "…"
    return f"Document: {title}\n" if title else "Document:\n"


def chunk_piece(label: str, text: str) -> str:
    """The chunk as it stands in a prompt."""
    return f"\n{label}{text}\n"


# Words that no template trims, translates or looks for.
_SYSTEM_MARK, _USER_MARK, _ANSWER_MARK = "MEMKVSYSTEMMARK", "MEMKVUSERMARK", "MEMKVANSWERMARK"
_MARKS = (_SYSTEM_MARK, _USER_MARK, _ANSWER_MARK)


def _conversations(system_prompt: str) -> list[tuple[str, list[dict[str, str]]]]:
    asked = {"role": "user", "content": _USER_MARK}
    if not system_prompt:
        return [("chat", [asked])]
    told = {"role": "system", "content": _SYSTEM_MARK}
    return [("chat", [told, asked]), ("chat without system role", [asked])]


def _cut(rendered: str, messages: list[dict[str, str]]) -> list[str] | None:
    """The template's text before, between and behind the marks; None unless they are as in the messages."""
    wanted = [message["content"] for message in messages if message["content"] in _MARKS]
    marks = "|".join(_MARKS)
    return re.split(marks, rendered) if re.findall(marks, rendered) == wanted else None


def _around_answer(tokenizer: PromptTokenizer, answer_start: str) -> tuple[str, str] | None:
    """Blanks that stand between `answer_start` and an earlier answer, and what leads to the next question."""
    turns = [("user", _USER_MARK), ("assistant", _ANSWER_MARK), ("user", _USER_MARK)]
    messages = [{"role": role, "content": mark} for role, mark in turns]
    rendered = tokenizer.render_chat(messages)
    cut = _cut(rendered, messages) if rendered else None
    if not cut:
        return None
    blanks = cut[1].removeprefix(answer_start)
    return (blanks if not blanks.strip(" ") else "", cut[2])


def _joined(system_prompt: str, instruction: str) -> str:
    return f"{system_prompt}\n\n{instruction}" if system_prompt else instruction
