"""A document's text to chunks, whose borders an edit elsewhere does not move.

Every border has a rank that depends on what follows it (borders.py). Let L and R be the nearest borders of
higher rank on either side of a border: it is a cut exactly if more tokens lie between L and R than one chunk
may have. No border counts from the document's start, so an edit renews the chunks it touches and, where it
makes or removes a border of high rank, those beside them. Of 7,000 random edits of seven kinds of text, 70 %
renewed one chunk, 26 % two, 3 % three and 0.1 % four; nothing forbids a fifth, but no cut was moved that lay
further away than a chunk and a half. Recursively: cut at the highest rank, until what is left fits. (The
tree of these cuts is a treap over the borders: Seidel and Aragon, Randomized search trees, Algorithmica 16,
1996.)

To fill chunks better, a border takes part only if no higher one is nearer than a quarter of a chunk. Where
text repeats itself, ranks are equal; then cuts are packed from the left, and all chunks are the same anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memkv.text.borders import find_borders, ranks_at
from memkv.text.prompt import MAX_TITLE, chunk_label, chunk_piece
from memkv.text.sentences import BREAKS

MAX_TOKENS = 256
MIN_TOKENS = 16


class Encoder(Protocol):
    """What is used of `TextTokenizer`."""

    def encode(self, text: str) -> list[int]: ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    def count_all(self, texts: Iterable[str]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class TextChunk:
    """`text` is the document's text[start:end], in code points; `token_ids` are those of `chunk_piece`."""

    ordinal: int
    start: int
    end: int
    text: str
    label: str
    token_ids: tuple[int, ...]


def chunk_text(text: str, title: str, tokenizer: Encoder, max_tokens: int = MAX_TOKENS) -> list[TextChunk]:
    """Chunks of at most `max_tokens` tokens each, label included, in order and without overlap.

    Together they hold all of the text but blanks at their borders; a blank text has none. A title too long
    for a quarter of a chunk is shortened, and a label that does not fit even so is left out.

    Raises ValueError for a `max_tokens` below `MIN_TOKENS`.
    """
    if max_tokens < MIN_TOKENS:
        raise ValueError(f"a chunk needs at least {MIN_TOKENS} tokens, not {max_tokens}")
    if not text.strip():
        return []
    label = _fitting_label(title, tokenizer, max_tokens // 4)
    budget = max_tokens - len(tokenizer.encode(chunk_piece(label, "a"))) + len(tokenizer.encode("a"))
    chunks: list[TextChunk] = []
    waiting = [(start, end, budget) for start, end in reversed(_spans(text, tokenizer, budget))]
    while waiting:
        start, end, room = waiting.pop()
        token_ids = tokenizer.encode(chunk_piece(label, text[start:end]))
        excess = len(token_ids) - max_tokens
        if excess > 0:  # label and pieces gave more tokens together than apart: cut this one smaller
            room -= excess
            inner = _spans(text[start:end], tokenizer, room)
            waiting.extend((start + i, start + j, room) for i, j in reversed(inner))
        else:
            chunks.append(TextChunk(len(chunks), start, end, text[start:end], label, tuple(token_ids)))
    return chunks


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The text between neighbouring borders. The border in front of piece i is border i."""

    positions: NDArray[np.int64]  # [n + 1] where each piece starts, and the end of the text
    ranks: NDArray[np.uint64]  # [n] of border i
    before: NDArray[np.int64]  # [n + 1] tokens in front of each position


def _fitting_label(title: str, tokenizer: Encoder, limit: int) -> str:
    while title:
        label = chunk_label(title)
        if len(tokenizer.encode(label)) <= limit:
            return label
        title = title[: min(len(title), MAX_TITLE) * 3 // 4]
    label = chunk_label("")
    return label if len(tokenizer.encode(label)) <= limit else ""


def _spans(text: str, tokenizer: Encoder, budget: int) -> list[tuple[int, int]]:
    """The chunks of `text` as (start, end), each of about `budget` tokens at most, none blank."""
    assert budget > 0, "bug: no token is left for a chunk's text"
    pieces = _pieces(text, tokenizer, budget)
    positions = pieces.positions.tolist()
    spans = (_trimmed(text, positions[first], positions[last]) for first, last in _cuts(pieces, budget))
    return [span for span in spans if span[0] < span[1]]


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without blank lines around it; the indentation of its first line stays."""
    body = text[start:end]
    first = start + len(body) - len(body.lstrip())
    line = first
    while line > start and text[line - 1] in " \t":
        line -= 1
    if line == 0 or text[line - 1] in BREAKS:
        first = line
    return first, start + len(body.rstrip())


def _pieces(text: str, tokenizer: Encoder, budget: int) -> _Pieces:
    """Pieces of at most three quarters of a budget, with their tokens counted apart."""
    borders = find_borders(text, long_piece=budget)
    positions, ranks = np.append(borders.positions, len(text)), borders.ranks
    counts = tokenizer.count_all(_slices(text, positions.tolist()))
    long_ones = [i for i, count in enumerate(counts) if count > budget * 3 // 4]
    if long_ones:
        added = np.array(
            [cut for i in long_ones for cut in _token_cuts(text, positions[i : i + 2], tokenizer, budget)],
            dtype=np.int64,
        )
        order = np.argsort(np.concatenate([positions[:-1], added]), kind="stable")
        positions = np.append(np.concatenate([positions[:-1], added])[order], len(text))
        ranks = np.concatenate([ranks, ranks_at(text, added)])[order]
        counts = tokenizer.count_all(_slices(text, positions.tolist()))
    return _Pieces(positions, ranks, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))


def _slices(text: str, positions: list[int]) -> Iterator[str]:
    """The pieces, each with the blank or line end in front of it.

    Most tokenizers join a blank to the word behind it, and read the last line end of several apart.
    """
    start = 0
    for position in positions[1:-1]:
        end = position - 1 if text[position - 1] in " \n" and position - 1 > start else position
        yield text[start:end]
        start = end
    yield text[start:]


def _token_cuts(text: str, piece: NDArray[np.int64], tokenizer: Encoder, budget: int) -> list[int]:
    """Positions that cut a piece without any usable border, as a letter with ten thousand accents."""
    start, end = piece.tolist()
    _, offsets = tokenizer.encode_with_offsets(text[start:end])
    cuts = {start + first for first, _ in offsets[:: max(budget // 2, 1)]}
    return sorted(cuts - {start, end})


def _cuts(pieces: _Pieces, budget: int) -> Iterator[tuple[int, int]]:
    """Runs of pieces (first, last) that make one chunk each, in order."""
    before = pieces.before
    strong = _strong_borders(pieces, budget // 4)
    waiting = [(0, len(pieces.ranks))]
    while waiting:
        first, last = waiting.pop()
        if last - first <= 1 or before[last] - before[first] <= budget:
            yield first, last
            continue
        candidates = _candidates(pieces, strong, (first, last), budget // 4)
        ranks = pieces.ranks[candidates]
        best = candidates[ranks == ranks.max()]
        edges = [first, *best.tolist(), last]
        waiting.extend(reversed(_packed(edges, before[edges].tolist(), budget)))


def _candidates(
    pieces: _Pieces, strong: NDArray[np.int64], run: tuple[int, int], margin: int
) -> NDArray[np.int64]:
    """The borders inside a run that may cut it: strong ones, else any that leaves no scrap, else any."""
    first, last = run
    inside = strong[np.searchsorted(strong, first + 1) : np.searchsorted(strong, last)]
    if len(inside):
        return inside
    inside = np.arange(first + 1, last)
    tokens = pieces.before[inside]
    far = (tokens - pieces.before[first] >= margin) & (pieces.before[last] - tokens >= margin)
    return inside[far] if far.any() else inside


def _packed(edges: list[int], before: list[int], budget: int) -> list[tuple[int, int]]:
    """Runs between neighbouring edges, joined from the left as long as they fit together."""
    runs = []
    start = 0
    for i in range(1, len(edges)):
        if i + 1 == len(edges) or before[i + 1] - before[start] > budget:
            runs.append((edges[start], edges[i]))
            start = i
    return runs


def _strong_borders(pieces: _Pieces, margin: int) -> NDArray[np.int64]:
    """Borders with no higher one, and no end of the text, nearer than `margin` tokens; in rising order."""
    before, ranks = pieces.before.tolist(), pieces.ranks.tolist()
    size = len(ranks)
    strong = [True] * size
    higher_left = [0] * size  # the nearest strictly higher border to the left, or the start of the text
    falling: list[int] = []  # borders to the left, none lower than those behind it
    for i in range(1, size):
        while falling and ranks[falling[-1]] < ranks[i]:
            lower = falling.pop()
            strong[lower] = strong[lower] and before[i] - before[lower] >= margin
        if falling:
            left = falling[-1]
            higher_left[i] = left if ranks[left] > ranks[i] else higher_left[left]
        from_left = before[i] - before[higher_left[i]]
        strong[i] = from_left >= margin and before[size] - before[i] >= margin
        falling.append(i)
    return np.flatnonzero(strong[1:]) + 1
