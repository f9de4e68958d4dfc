"""Chunks hold the text, fit the limit, are well filled, and stay where they are when the text changes."""

from __future__ import annotations

import random
import re
import string
import time
from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memkv.text.chunker import MAX_TOKENS, TextChunk, chunk_text
from memkv.text.prompt import chunk_piece
from memkv.text.tokenizer import TextTokenizer


class WordTokenizer:
    """Quick and greedy as a model's tokenizer: up to five letters of a word, with the blank before it."""

    _token = re.compile(r" ?[^\W\d_]{1,5}|\d|\s|[^\w\s]|_")

    def encode(self, text: str) -> list[int]:
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = list(self._token.finditer(text))
        return [hash(match.group()) & 0xFFFF for match in found], [match.span() for match in found]

    def count_all(self, texts: Iterable[str]) -> list[int]:
        return [len(self._token.findall(text)) for text in texts]


WORDS = WordTokenizer()
VOCABULARY = ["".join(random.Random(i).choices(string.ascii_lowercase, k=2 + i % 9)) for i in range(2000)]
HANZI = [chr(code) for code in range(0x4E00, 0x5600, 2)]


def check(text: str, chunks: list[TextChunk], max_tokens: int) -> None:
    at = 0
    for i, chunk in enumerate(chunks):
        assert chunk.ordinal == i
        assert chunk.start >= at
        assert not text[at : chunk.start].strip()
        assert chunk.text == text[chunk.start : chunk.end]
        assert chunk.text.strip()
        assert 0 < len(chunk.token_ids) <= max_tokens
        at = chunk.end
    assert not text[at:].strip()


PARTS = [
    "word",
    " ",
    "\n",
    "\n\n",
    ". ",
    "# H",
    "    ",
    "\uff0c",
    "。",
    "世界",
    "e\u0301",
    "👩‍👧",
    "\u2028",
    "x" * 50,
]
structured = st.lists(st.sampled_from(PARTS)).map("".join)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), structured), st.sampled_from([16, 17, 24, 64, 256]), st.text(max_size=120))
@example("\n" * 3000, 16, "")
@example("e" + "\u0301" * 2000, 16, "t")
@example("x" * 3000, 16, "a title of several words that leaves little")
def test_chunks_hold_the_text_and_fit(text: str, max_tokens: int, title: str) -> None:
    chunks = chunk_text(text, title, WORDS, max_tokens)
    check(text, chunks, max_tokens)
    assert chunks == chunk_text(text, title, WORDS, max_tokens)


@settings(max_examples=60, deadline=None)
@given(structured, st.sampled_from([16, 64]))
@example("🇩🇪" * 400, 16)
@example("日本語" * 400, 16)
@example("a\u0301\u0302" * 400, 16)
def test_the_limit_holds_for_a_real_tokenizer(
    smollm2_tokenizer: TextTokenizer, text: str, max_tokens: int
) -> None:
    chunks = chunk_text(text * 3, "Title", smollm2_tokenizer, max_tokens)
    check(text * 3, chunks, max_tokens)
    for chunk in chunks:
        assert list(chunk.token_ids) == smollm2_tokenizer.encode(chunk_piece(chunk.label, chunk.text))


def test_joining_that_costs_tokens_is_cut_again() -> None:
    class Costly(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            ids = super().encode(text)
            return ids + ids[: len(ids) // 3]  # a third more than the pieces gave apart

    text = prose(random.Random(5), 40)[0]
    check(text, chunk_text(text, "t", Costly(), 64), 64)


def test_labels_carry_the_title_where_it_fits() -> None:
    text = prose(random.Random(6), 8)[0]
    assert {chunk.label for chunk in chunk_text(text, "A title", WORDS, 64)} == {"Document: A title\n"}
    assert {chunk.label for chunk in chunk_text(text, "", WORDS, 64)} == {"Document:\n"}
    long = chunk_text(text, "many words " * 20, WORDS, 64)
    assert len(WORDS.encode(long[0].label)) <= 16
    assert long[0].label.startswith("Document: many")
    with pytest.raises(ValueError, match="at least 16"):
        chunk_text(text, "", WORDS, 15)


def test_indentation_of_the_first_line_stays() -> None:
    code = "\n\n".join(f"    def f{i}(self):\n        return {i} * {i}" for i in range(200))
    for chunk in chunk_text(code, "", WORDS, 64):
        assert chunk.text.startswith("    def")


# Documents of about a hundred chunks as (parts, separator), by kind.
Parts = tuple[list[str], str]


def sentence(generator: random.Random) -> str:
    words = generator.choices(VOCABULARY, k=generator.randint(4, 22))
    return " ".join(words).capitalize() + generator.choice(".....?!")


def prose_parts(generator: random.Random, size: int = 400) -> Parts:
    return [
        " ".join(sentence(generator) for _ in range(generator.randint(1, 5))) for _ in range(size)
    ], "\n\n"


def prose(generator: random.Random, size: int) -> tuple[str, list[str]]:
    parts, separator = prose_parts(generator, size)
    return separator.join(parts), parts


def unpunctuated(generator: random.Random) -> Parts:
    return [" ".join(generator.choices(VOCABULARY, k=25)) for _ in range(400)], " "


def hanzi(generator: random.Random) -> Parts:
    return ["".join(generator.choices(HANZI, k=100)) for _ in range(500)], ""


def hanzi_sentences(generator: random.Random) -> Parts:
    clauses = ["".join(generator.choices(HANZI, k=generator.randint(5, 30))) for _ in range(4000)]
    return ["\uff0c".join(clauses[i : i + 4]) + "。" for i in range(0, 4000, 4)], ""


def one_line(generator: random.Random) -> Parts:
    alphabet = string.ascii_letters + string.digits
    return ["".join(generator.choices(alphabet, k=100)) for _ in range(1000)], ""


def code(generator: random.Random) -> Parts:
    parts = []
    for _ in range(250):
        name, *rest = generator.choices(VOCABULARY, k=8)
        lines = [f"    {word} = {generator.choice(rest)}({generator.randint(0, 99)})" for word in rest]
        parts.append(
            f"def {name}():\n" + "\n".join(lines[: generator.randint(1, 7)]) + f"\n    return {name}"
        )
    return parts, "\n\n\n"


def markdown(generator: random.Random) -> Parts:
    parts = []
    for _ in range(70):
        parts.append("#" * generator.randint(1, 3) + " " + " ".join(generator.choices(VOCABULARY, k=4)))
        for _ in range(generator.randint(1, 4)):
            if generator.random() < 0.4:
                items = (
                    " ".join(generator.choices(VOCABULARY, k=generator.randint(3, 12))) for _ in range(5)
                )
                parts.append("\n".join(f"- {item}" for item in items))
            else:
                parts.append(prose(generator, 1)[0])
    return parts, "\n\n"


KINDS = [prose_parts, unpunctuated, hanzi, hanzi_sentences, one_line, code, markdown]
Chunker = Callable[[str], list[tuple[int, ...]]]


def our_chunks(text: str) -> list[tuple[int, ...]]:
    return [chunk.token_ids for chunk in chunk_text(text, "Title", WORDS)]


def counted_chunks(text: str) -> list[tuple[int, ...]]:
    """The control: cuts by counting from the start."""
    ids = WORDS.encode(text)
    return [tuple(ids[i : i + MAX_TOKENS]) for i in range(0, len(ids), MAX_TOKENS)]


def edited(generator: random.Random, parts: list[str], other: list[str]) -> list[str]:
    """A part inserted, replaced, deleted, or changed by some characters."""
    parts = list(parts)
    at = generator.randrange(len(parts))
    inside = generator.randrange(len(parts[at]))
    match generator.randrange(5):
        case 0:
            parts.insert(at, generator.choice(other))
        case 1:
            parts[at] = generator.choice(other)
        case 2:
            del parts[at]
        case 3:
            parts[at] = parts[at][:inside] + " some new words " + parts[at][inside:]
        case 4:
            parts[at] = parts[at][:inside] + parts[at][inside + 3 :]
    return parts


def renewed(kind: Callable[[random.Random], Parts], chunker: Chunker, edits: int) -> list[int]:
    """How many chunks of each edited document the unedited one did not have."""
    generator = random.Random(11)
    parts, separator = kind(generator)
    other, _ = kind(generator)
    known = set(chunker(separator.join(parts)))
    assert len(known) > 60
    return [len(set(chunker(separator.join(edited(generator, parts, other)))) - known) for _ in range(edits)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_renews_few_chunks(kind: Callable[[random.Random], Parts]) -> None:
    counts = renewed(kind, our_chunks, 25)
    assert max(counts) <= 3, counts
    assert sum(counts) / len(counts) < 2.2


def test_of_many_edits_few_renew_more_than_two() -> None:
    counts = renewed(markdown, our_chunks, 300)
    assert max(counts) <= 4
    assert sum(count > 3 for count in counts) <= 3
    assert sum(count > 2 for count in counts) <= 15


def test_counting_from_the_start_would_renew_many() -> None:
    assert sorted(renewed(prose_parts, counted_chunks, 20))[10] > 10


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_filled(kind: Callable[[random.Random], Parts]) -> None:
    parts, separator = kind(random.Random(3))
    chunks = our_chunks(separator.join(parts))
    assert sum(map(len, chunks)) / len(chunks) >= 0.5 * MAX_TOKENS
    assert sum(len(chunk) < MAX_TOKENS // 4 for chunk in chunks) <= len(chunks) // 20


def test_one_edited_paragraph_with_a_real_tokenizer(smollm2_tokenizer: TextTokenizer) -> None:
    generator = random.Random(8)
    _, parts = prose(generator, 150)

    def keys(parts: list[str]) -> list[tuple[int, ...]]:
        return [chunk.token_ids for chunk in chunk_text("\n\n".join(parts), "Report", smollm2_tokenizer)]

    first = keys(parts)
    assert len(first) > 70
    assert sum(map(len, first)) / len(first) >= 0.5 * MAX_TOKENS
    for at in (0, 40, 75, 110, 149):
        changed = [*parts[:at], sentence(generator), *parts[at + 1 :]]
        assert sum(chunk not in first for chunk in keys(changed)) <= 3


@pytest.mark.parametrize("unit", ["a", "abc", "x\n", "one two three. ", "| a | b |\n", "日本"])
def test_repetition_gives_the_same_chunk_again(unit: str) -> None:
    text = unit * (60_000 // len(unit))
    chunks = our_chunks(text)
    assert len(set(chunks)) <= 6
    assert sum(map(len, chunks)) / len(chunks) >= 0.5 * MAX_TOKENS
    middle = len(text) // 2 // len(unit) * len(unit)
    assert len(set(our_chunks(text[:middle] + "!" + text[middle:])) - set(chunks)) <= 5


@pytest.mark.parametrize("unit", ["word ", "a", ". ", "x\n", "\n"])
def test_large_documents_take_bounded_time(unit: str) -> None:
    started = time.perf_counter()
    chunk_text(unit * (500_000 // len(unit)), "", WORDS)
    assert time.perf_counter() - started < 20.0
