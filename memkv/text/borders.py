"""Where a text may be cut, and how gladly: by what stands there, not by how far it is from the start.

A border has a rank: its level (heading > paragraph > ... > any character) and, among equals, a hash of the
32 characters that *follow* it. Nothing in front of a border counts, so that an edit changes the rank of
borders inside it and of the one whose following characters it touches, and of no other.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memkv.text.sentences import BREAKS, CLAUSE_MARKS, TERMINALS, sentence_starts

HEAD = 32  # characters behind a border that decide its rank


class Level(IntEnum):
    CHARACTER = 0  # only inside what has no better border for a long way
    WORD = 1
    CLAUSE = 2  # behind a comma or the like; also behind a heading, which belongs to what follows
    LINE = 3
    SENTENCE = 4
    BLOCK = 5  # behind an empty line, in front of an indented one
    PARAGRAPH = 6  # behind an empty line
    HEADING = 7  # in front of a Markdown heading


@dataclass(frozen=True, slots=True)
class Borders:
    positions: NDArray[np.int64]  # [n] rising; a piece is text[positions[i] : positions[i + 1]]; starts at 0
    ranks: NDArray[np.uint64]  # [n] level in the top byte, hash below


def find_borders(text: str, long_piece: int) -> Borders:
    """Borders of structure; in pieces of more than `long_piece` bytes also those of words and characters."""
    levels = _line_borders(text)
    for position in sentence_starts(text):
        levels[position] = max(levels.get(position, 0), Level.SENTENCE)
    levels.pop(0, None)
    codes = _code_points(text)
    positions = np.array([0, *sorted(levels)], dtype=np.int64)
    ranks = _ranks(codes, positions, np.array([0, *(levels[p] for p in positions[1:].tolist())]))
    return _merged(Borders(positions, ranks), _inner_borders(codes, Borders(positions, ranks), long_piece))


def ranks_at(text: str, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Ranks of borders between any two characters."""
    return _ranks(_code_points(text), positions, np.zeros(len(positions), dtype=np.int64))


_LINE = re.compile(f"[^{BREAKS}]+")
_HEADING = re.compile(r"#{1,6}[ \t]")
_LINE_ENDS = (*TERMINALS, ":", ";")
_CLAUSE_MARKS = np.array([ord(char) for char in CLAUSE_MARKS], dtype=np.uint32)
_BLANKS = np.array([0x20, 0x09, 0xA0, 0x3000], dtype=np.uint32)
_REACH = 8  # characters on each side over which an inner border must be the best
_MULTIPLIERS = np.random.default_rng(0x6D656D6B76).integers(1, 2**63, HEAD, dtype=np.uint64) | np.uint64(1)


def _merged(some: Borders, others: Borders) -> Borders:
    positions = np.concatenate([some.positions, others.positions])
    order = np.argsort(positions, kind="stable")
    return Borders(positions[order], np.concatenate([some.ranks, others.ranks])[order])


def _line_borders(text: str) -> dict[int, int]:
    """Starts of lines that are not blank, and their levels."""
    levels: dict[int, int] = {}
    last_end, last_line = 0, ""
    for match in _LINE.finditer(text):
        line = match.group()
        if line.isspace():
            continue
        gap = len(text[last_end : match.start()].translate(_NO_BLANKS))
        levels[match.start()] = _line_level(last_line, line, gap)
        last_end, last_line = match.end(), line
    return levels


_NO_BLANKS = {ord(char): None for char in " \t\u00a0\u3000"}


def _line_level(last: str, line: str, gap: int) -> Level:
    """`gap`: line breaks between the two lines; from two on there is an empty line between them."""
    if _HEADING.match(line):
        return Level.HEADING
    if _HEADING.match(last):
        return Level.CLAUSE
    if gap > 1:
        return Level.BLOCK if line[0].isspace() else Level.PARAGRAPH
    return Level.SENTENCE if last.rstrip().endswith(_LINE_ENDS) else Level.LINE


def _code_points(text: str) -> NDArray[np.uint32]:
    """Of the text and of `HEAD` zeros behind it."""
    return np.frombuffer((text + "\x00" * HEAD).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def _ranks(
    codes: NDArray[np.uint32], positions: NDArray[np.int64], levels: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """A polynomial hash of the code points behind each position, mixed, under the level."""
    hashes = np.zeros(len(positions), dtype=np.uint64)
    for i, multiplier in enumerate(_MULTIPLIERS):
        hashes += codes[positions + i] * multiplier
    # The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(31)
    return (levels.astype(np.uint64) << np.uint64(56)) | (hashes >> np.uint64(8))


def _inner_borders(codes: NDArray[np.uint32], borders: Borders, long_piece: int) -> Borders:
    """Borders inside pieces that are too long to be kept whole: those that no near one exceeds in rank.

    In text that repeats itself many ranks are equal; of those that lie close together every one that is
    `_REACH` behind the last is taken, so that all repetitions are cut at the same place.
    """
    size = len(codes) - HEAD
    widths = 1 + (codes[:size] >= 0x80) + (codes[:size] >= 0x800) + (codes[:size] >= 0x10000)
    offsets = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
    ends = np.append(borders.positions[1:], size)
    long = offsets[ends] - offsets[borders.positions] > long_piece
    inside = np.repeat(long, ends - borders.positions)
    inside[borders.positions] = False
    positions = np.flatnonzero(inside)
    ranks = np.zeros(size, dtype=np.uint64)
    ranks[positions] = _ranks(codes, positions, _inner_levels(codes, positions))
    highest = ranks[positions] == _window_max(ranks, _REACH)[positions]
    positions = positions[highest & _may_begin(codes, positions)]
    kept = []
    last = -_REACH
    for position in positions.tolist():
        if position - last >= _REACH:
            kept.append(position)
            last = position
    return Borders(np.array(kept, dtype=np.int64), ranks[kept])


def _inner_levels(codes: NDArray[np.uint32], positions: NDArray[np.int64]) -> NDArray[np.uint8]:
    here, before = np.isin(codes[positions], _BLANKS), np.isin(codes[positions - 1], _BLANKS)
    two_before = codes[np.maximum(positions - 2, 0)]
    word = before & ~here
    marked = np.isin(codes[positions - 1], _CLAUSE_MARKS) & ~here & (codes[positions - 1] > 0x7F)
    clause = marked | (word & np.isin(two_before, _CLAUSE_MARKS))
    levels = np.where(clause, Level.CLAUSE, np.where(word, Level.WORD, Level.CHARACTER))
    return levels.astype(np.uint8)


def _may_begin(codes: NDArray[np.uint32], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Not between a letter and its marks, nor inside an emoji that joiners hold together."""
    present, inverse = np.unique(codes[positions], return_inverse=True)
    joined = np.array([_joins(chr(code)) for code in present.tolist()], dtype=np.bool_)
    may_begin: NDArray[np.bool_] = ~joined[inverse] & (codes[positions - 1] != 0x200D)
    return may_begin


def _joins(char: str) -> bool:
    return (
        unicodedata.category(char).startswith("M") or char == "\u200d" or "\U0001f3fb" <= char <= "\U0001f3ff"
    )


def _window_max(values: NDArray[np.uint64], reach: int) -> NDArray[np.uint64]:
    """The maximum of values[i - reach : i + reach + 1] for each i."""
    padded = np.pad(values, reach)
    best = padded.copy()
    covered, width = 1, 2 * reach + 1
    while covered < width:
        step = min(covered, width - covered)
        best[: len(best) - step] = np.maximum(best[: len(best) - step], best[step:])
        covered += step
    return best[: len(values)]
