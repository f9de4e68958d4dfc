"""`memkv demo` as a newcomer runs it: the default models, defaults everywhere."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Run

from memkv.cli.demo import QUESTIONS

SAID = dict(zip(QUESTIONS, ("16", "Ingrid Moss", "187 kilometres"), strict=True))


def test_answers_are_right_and_reuse_is_counted(run: Run, smollm2: Path, minilm: Path) -> None:
    result = run("demo", "--format", "json")
    assert result.exit_code == 0, result.output
    rows = {(row["question"], row["way"]): row for row in json.loads(result.stdout)}
    for question, words in SAID.items():
        assert words in rows[question, "exact"]["answer"]
        assert rows[question, "exact"]["answer"] == rows[question, "off"]["answer"]
        off, exact, head, mapped = (
            rows[question, way]["prefilled_tokens"] for way in ("off", "exact", "head:1", "map")
        )
        assert off == rows[question, "off"]["prompt_tokens"] > exact
        assert head == mapped + 3 * 16  # one block of each of the three later chunks
        assert mapped < 40  # the question and the template behind it
