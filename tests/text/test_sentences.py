# ruff: noqa: RUF001  (punctuation of other scripts)
"""Sentence ends in several scripts, and none where only a dot stands."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkv.text.sentences import sentence_spans


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in sentence_spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?  Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("Costs 3.5 percent, i.e. little. Dr. A. Smith agrees.", 2),
        ("1. First thing\n2. Second thing. More", ["1. First thing", "2. Second thing.", "More"]),
        ("line one\n\nline two\r\nline three", 3),
        ("来た。「待て。」と言う。本当か？はい", ["来た。", "「待て。」", "と言う。", "本当か？", "はい"]),
        ("यह एक है। यह दो है।", 2),
        ("see e.g. this and that", 1),
        ("", []),
        (" \n ", []),
    ],
)  # fmt: skip
def test_sentences(text: str, expected: list[str] | int) -> None:
    found = sentences(text)
    assert (len(found) if isinstance(expected, int) else found) == expected


@settings(deadline=None)
@given(st.text(alphabet="aA1.!? \n。」\u2028", max_size=60))
def test_spans_cover_all_that_is_not_blank(text: str) -> None:
    at = 0
    for start, end in sentence_spans(text):
        assert start >= at
        assert text[at:start].isspace() or at == start
        assert text[start:end] == text[start:end].strip() != ""
        at = end
    assert not text[at:].strip()


@pytest.mark.parametrize(
    "text", ["." * 300_000, ". " * 150_000, ".\"'" * 100_000, "。" * 300_000, " " * 300_000]
)
def test_a_scan_is_linear(text: str) -> None:
    started = time.perf_counter()
    sentence_spans(text)
    assert time.perf_counter() - started < 5.0
