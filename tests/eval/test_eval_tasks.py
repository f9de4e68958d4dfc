"""Tasks: read from files, made up, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from memkv.errors import BadRequestError
from memkv.eval.generator import KINDS, generate_tasks
from memkv.eval.study import Name
from memkv.eval.tasks import describe, read_tasks

GOOD = {"question": "Who?", "answers": ["Ada"], "contexts": ["Ada did it."]}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_both_forms_are_read(tmp_path: Path) -> None:
    long_form = {**GOOD, "id": "x7", "contexts": [{"document_id": "d", "text": "Ada did it."}], "turns": []}
    tasks = read_tasks(write(tmp_path / "set.jsonl", GOOD, "", long_form))
    assert [task.id for task in tasks] == ["set-1", "x7"]
    assert tasks[0].contexts == tasks[1].contexts == ("Ada did it.",)
    assert {task.kind for task in tasks} == {"set"}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("{", "line 2: no JSON from character 2 on"),
        ("[]", "list"),
        ("[" * 100_000, "line 2"),
        ({**GOOD, "question": " "}, "question"),
        ({**GOOD, "question": None}, "question"),
        ({**GOOD, "answers": []}, "answers"),
        ({**GOOD, "answers": [""]}, "answers"),
        ({**GOOD, "answers": [3]}, "answers"),
        ({"question": "Who?", "answers": ["Ada"]}, "contexts"),
        ({**GOOD, "contexts": [{}]}, "context"),
        ({**GOOD, "contexts": ["\n"]}, "context"),
        ({**GOOD, "question": "\ud800"}, "surrogate"),
        ({**GOOD, "kind": "\udfff"}, "surrogate"),
        ({**GOOD, "answer_start": None}, "answer_start"),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path: Path, row: object, what: str) -> None:
    with pytest.raises(BadRequestError, match=what) as caught:
        read_tasks(write(tmp_path / "set.jsonl", GOOD, row))
    assert "line 2" in caught.value.detail
    assert '"question"' in caught.value.hint


def test_names_are_such_as_a_result_can_keep(tmp_path: Path) -> None:
    odd = write(tmp_path / ("long\n" + "x" * 200), {**GOOD, "kind": "a\x00b" + "k" * 300}, GOOD)
    for name in (*(task.kind for task in read_tasks(odd)), describe(odd)):
        assert msgspec.convert(name, Name).isprintable()


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="no file"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(BadRequestError, match="no tasks"):
        read_tasks(write(tmp_path / "empty.jsonl", "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    with pytest.raises(BadRequestError, match="cannot be read"):
        read_tasks(tmp_path / "latin.jsonl")
    with pytest.raises(BadRequestError, match="no file"):
        read_tasks(tmp_path)


def test_made_up_tasks_hold_their_answers_and_share_no_names() -> None:
    tasks = generate_tasks(200, seed=3)
    assert tasks == generate_tasks(200, seed=3)
    assert tasks != generate_tasks(200, seed=4)
    assert [task.kind for task in tasks[:4]] == list(KINDS)
    assert len({task.answer_start for task in tasks}) == len(tasks)
    for task in tasks:
        facts = " ".join(task.contexts)
        words = task.answers[0].removesuffix(".").split(". ")[-1].split()
        assert words[-1] in facts
        if task.kind != "aggregation":
            own = task.answer_start.split(" the ")[-1].split(" is")[0]
            others = " ".join(text for other in tasks if other is not task for text in other.contexts)
            assert own in facts
            assert own not in others


def test_what_occurs_most_often_is_the_answer() -> None:
    for task in generate_tasks(20, kinds=("aggregation",)):
        sign = task.answers[0].removesuffix(".")
        assert sum(f"was the {sign}." in context for context in task.contexts) == 4
        assert len(task.contexts) == 7


def test_more_tasks_than_names_are_refused() -> None:
    with pytest.raises(BadRequestError, match="cannot be made"):
        generate_tasks(100_000)
    with pytest.raises(BadRequestError, match="riddles"):
        generate_tasks(1, kinds=("riddles",))


def test_line_ends_of_unicode_and_a_mark_at_the_start_are_text(tmp_path: Path) -> None:
    row = json.dumps({**GOOD, "question": "One\u2028two\u0085three?"}, ensure_ascii=False)
    (tmp_path / "set.jsonl").write_text(f"\ufeff{row}\r\n{row}\n", encoding="utf-8", newline="")
    assert [task.question for task in read_tasks(tmp_path / "set.jsonl")] == ["One\u2028two\u0085three?"] * 2
