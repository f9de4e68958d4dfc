"""Questions with the contexts that answer them, read from JSON lines.

    {"question": "...", "answers": ["..."], "contexts": ["..." or {"text": "..."}]}

The MTRAG form is the same with more fields; of those, `id` and `collection` are used where they are there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memkv.errors import BadRequestError

_FORM = 'one JSON object a line: {"question": "...", "answers": ["..."], "contexts": ["..."]}'

_MAX_NAME = 100  # characters of a kind's and of a file's name that are kept


@dataclass(frozen=True, slots=True)
class Task:
    """One question.

    Attributes:
        kind: tasks of one kind are reported together.
        answers: the first one is what the model is measured on; any of them counts as right.
        contexts: texts that hold the answer.
        answer_start: how the answer begins; given to the model, so that the rest is what it has to know.
        distractors: texts to fill the prompt with; None: the contexts of the other tasks.
    """

    id: str
    kind: str
    question: str
    answers: tuple[str, ...]
    contexts: tuple[str, ...]
    answer_start: str = ""
    distractors: tuple[str, ...] | None = None


def read_tasks(path: Path) -> list[Task]:
    """Every task of a file.

    Raises:
        BadRequestError: the file cannot be read, or a line is no task; the line's number is named.
    """
    try:
        if not path.is_file():  # a pipe could not be read again for its digest
            raise BadRequestError(f"there is no file {path}", hint="give --data FILE.jsonl")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{path} cannot be read: {error}", hint=f"it is to be UTF-8, {_FORM}") from None
    tasks = list(_tasks(text, path))
    if not tasks:
        raise BadRequestError(f"{path} holds no tasks", hint=_FORM)
    return tasks


def describe(path: Path) -> str:
    """A file's name and what it holds, for the record: SHA-256 in part."""
    return f"{_name(path.name)} (sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]})"


def _tasks(text: str, path: Path) -> Iterator[Task]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield _task(json.loads(line), f"{path.stem}-{number}", path.stem)
            except json.JSONDecodeError as error:
                why = f"no JSON from character {error.pos + 1} on: {error.msg}"
                raise BadRequestError(f"{path}, line {number}: {why}", hint=_FORM) from None
            except (ValueError, RecursionError) as error:
                raise BadRequestError(f"{path}, line {number}: {error}", hint=_FORM) from None


def _task(row: Any, default_id: str, default_kind: str) -> Task:
    """Raises ValueError with what is wrong."""
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} where an object is wanted")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no text") from None
    contexts = [_text_of(context) for context in _list(row, "contexts")]
    answers = _list(row, "answers")
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("`question` is missing or empty")
    if not all(isinstance(answer, str) for answer in answers) or not str(answers[0]).strip():
        raise ValueError("`answers` holds something that is no text, or an empty one")
    kind, answer_start = row.get("kind"), row.get("answer_start", "")
    if not isinstance(answer_start, str):
        raise ValueError("`answer_start` is no text")
    return Task(
        id=str(row.get("id", default_id)),
        kind=_name(kind if isinstance(kind, str) and kind else default_kind),
        question=question,
        answers=tuple(answers),
        contexts=tuple(contexts),
        answer_start=answer_start,
    )


def _name(text: str) -> str:
    """As a result can keep it: on one line, and short."""
    return "".join(char if char.isprintable() else " " for char in text)[:_MAX_NAME]


def _list(row: dict[str, Any], name: str) -> list[Any]:
    found = row.get(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"`{name}` is missing or an empty list")
    return found


def _text_of(context: Any) -> str:
    text = context.get("text") if isinstance(context, dict) else context
    if not isinstance(text, str) or not text.strip():
        raise ValueError("a context has no text")
    return text
