"""Answers cite the chunks they came from, with the words that say so, and nothing else."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkv.text.citations import FLOOR, MAX_SOURCES, AlignedSentence, CitableChunk, align
from memkv.text.sentences import sentence_spans

RIVERS = "The Danube rises in the Black Forest. It flows 2,850 km to the Black Sea.\nShips use it all year."
TOWERS = "The Eiffel Tower was finished in 1889. Gustave Eiffel's company built it for a world fair."
BRIDGES = "The bridge opened in 1932. It carries eight lanes of road traffic, and two of rail."
CHUNKS = [CitableChunk(10, RIVERS), CitableChunk(20, TOWERS), CitableChunk(30, BRIDGES)]


def quotes(aligned: list[AlignedSentence]) -> list[tuple[int, str]]:
    texts = {chunk.index: chunk.text for chunk in CHUNKS}
    return [
        (source.index, texts[source.index][source.quote_start : source.quote_end])
        for sentence in aligned
        for source in sentence.sources
    ]


def test_each_sentence_names_its_chunk_and_quotes_it() -> None:
    answer = "Eiffel's company built it for a fair. The Danube flows 2850 km to the Black Sea."
    aligned = align(answer, CHUNKS)
    assert [answer[sentence.start : sentence.end] for sentence in aligned] == [
        "Eiffel's company built it for a fair.",
        "The Danube flows 2850 km to the Black Sea.",
    ]
    assert quotes(aligned) == [
        (20, "Gustave Eiffel's company built it for a world fair."),
        (10, "The Danube rises in the Black Forest. It flows 2,850 km to the Black Sea."),
    ]


def test_numbers_decide_between_alike_sentences() -> None:
    alike = [
        CitableChunk(i, f"The bridge was opened in {year}.") for i, year in enumerate((1931, 1932, 1933))
    ]
    (sentence,) = align("The bridge was opened in 1932.", alike)
    assert sentence.sources[0].index == 1
    assert sentence.sources[0].score == pytest.approx(1.0)
    assert all(source.score < 0.9 for source in sentence.sources[1:])


@pytest.mark.parametrize(
    "answer",
    [
        "",
        " \n",
        "Yes.",
        "I do not know.",
        "Penguins cannot fly but swim very well under water.",
        "1. ",
        "...",
    ],
)
def test_what_no_chunk_says_is_not_cited(answer: str) -> None:
    assert align(answer, CHUNKS) == []


def test_no_chunks_no_citations() -> None:
    assert align("The Danube rises.", []) == []
    assert align("The Danube rises.", [CitableChunk(0, "")]) == []


def test_text_without_blanks_is_aligned_too() -> None:
    chunks = [
        CitableChunk(0, "東京は日本の首都である。人口は多い。"),
        CitableChunk(1, "富士山は日本で一番高い山である。"),
    ]
    aligned = align("日本の首都は東京です。富士山が一番高い。", chunks)
    assert [sentence.sources[0].index for sentence in aligned] == [0, 1]


def test_the_same_words_in_two_chunks_name_both() -> None:
    chunks = [CitableChunk(4, RIVERS), CitableChunk(2, "Note. " + RIVERS), CitableChunk(9, TOWERS)]
    (sentence,) = align("The Danube rises in the Black Forest.", chunks)
    assert [source.index for source in sentence.sources] == [2, 4]


@settings(deadline=None)
@given(st.text(max_size=200), st.lists(st.text(max_size=200), max_size=4))
def test_every_citation_is_well_formed(answer: str, texts: list[str]) -> None:
    chunks = [CitableChunk(i * 7, text) for i, text in enumerate([*texts, answer[:100]])]
    by_index = {chunk.index: chunk.text for chunk in chunks}
    at = 0
    for sentence in align(answer, chunks):
        assert at <= sentence.start < sentence.end <= len(answer)
        at = sentence.end
        scores = [source.score for source in sentence.sources]
        assert scores == sorted(scores, reverse=True)
        assert 1 <= len(scores) <= MAX_SOURCES
        for source in sentence.sources:
            assert FLOOR <= source.score <= 1.0
            quote = by_index[source.index][source.quote_start : source.quote_end]
            assert quote == quote.strip() != ""


@pytest.fixture(scope="module")
def tasks(real_data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (real_data / "mtrag" / "tasks.jsonl").read_text().splitlines()]


def test_reference_answers_cite_their_own_contexts(tasks: list[dict[str, Any]]) -> None:
    """Gold contexts among distractors of the same collection, ten in all: chance would cite 29 % gold."""
    generator = random.Random(4)
    pools: dict[str, dict[str, str]] = {}
    for task in tasks:
        pool = pools.setdefault(task["collection"], {})
        pool.update((context["document_id"], context["text"]) for context in task["contexts"])
    sentences = cited = gold_first = sources = gold_sources = 0
    for task in tasks:
        gold = {context["document_id"] for context in task["contexts"]}
        pool = pools[task["collection"]]
        others = [name for name in pool if name not in gold]
        names = [*sorted(gold), *generator.sample(others, max(0, 10 - len(gold)))]
        generator.shuffle(names)
        answer = task["answers"][0]
        aligned = align(answer, [CitableChunk(i, pool[name]) for i, name in enumerate(names)])
        sentences += len(sentence_spans(answer))
        cited += len(aligned)
        gold_first += sum(names[sentence.sources[0].index] in gold for sentence in aligned)
        named = [names[source.index] in gold for sentence in aligned for source in sentence.sources]
        sources, gold_sources = sources + len(named), gold_sources + sum(named)
    assert cited / sentences > 0.75
    assert gold_first / cited > 0.95
    assert gold_sources / sources > 0.95


def test_answers_to_other_questions_are_hardly_ever_cited(tasks: list[dict[str, Any]]) -> None:
    generator = random.Random(1)
    sentences = cited = 0
    for task in tasks:
        other = generator.choice([found for found in tasks if found["collection"] != task["collection"]])
        chunks = [CitableChunk(i, context["text"]) for i, context in enumerate(task["contexts"])]
        sentences += len(sentence_spans(other["answers"][0]))
        cited += len(align(other["answers"][0], chunks))
    assert cited / sentences < 0.04


def test_twenty_sentences_and_chunks_take_little_time(tasks: list[dict[str, Any]]) -> None:
    texts = [context["text"] for task in tasks for context in task["contexts"]]
    chunks = [CitableChunk(i, text[:1200]) for i, text in enumerate(itertools.islice(texts, 20))]
    spans = [(task["answers"][0], span) for task in tasks for span in sentence_spans(task["answers"][0])]
    answer = " ".join(text[start:end] for text, (start, end) in spans[:20])
    fastest = min(_seconds(answer, chunks) for _ in range(10))
    assert fastest < 0.02


def _seconds(answer: str, chunks: list[CitableChunk]) -> float:
    started = time.process_time()
    align(answer, chunks)
    return time.process_time() - started
