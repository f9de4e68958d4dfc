# ruff: noqa: RUF001  (the punctuation of other scripts is what this file is about)
"""Where sentences end, in running text of most scripts.

A rule of thumb, not a parser: a full stop and a blank in front of anything but a small letter, unless the
stop belongs to an initial, a well-known abbreviation or the number of a list item.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

BREAKS = "\n\x0b\x0c\x85\u2028\u2029"  # what ends a line; reader.py has made CRLF and CR into LF
TERMINALS = ".!?…؟۔।॥。！？｡"
CLAUSE_MARKS = ",;:|，、；：·"


def sentence_starts(text: str) -> Iterator[int]:
    """Positions behind the end of a sentence inside a line, in rising order, never 0 or the end."""
    for match in _SENTENCE_END.finditer(text):
        if not _NO_END.search(text, max(0, match.start() - 12), match.start()):
            yield match.end()


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """The sentences of `text` as (start, end), without the blanks around them; a line break ends one too."""
    borders = {0, len(text), *sentence_starts(text), *(match.end() for match in _BREAK.finditer(text))}
    spans = []
    ordered = sorted(borders)
    for first, last in itertools.pairwise(ordered):
        part = text[first:last]
        start = first + len(part) - len(part.lstrip())
        end = first + len(part.rstrip())
        if start < end:
            spans.append((start, end))
    return spans


# Every alternative is anchored by a lookbehind on one character and bounded, so that a scan stays linear on
# text made of dots or of blanks.
_SENTENCE_END = re.compile(
    r"""(?<=[.!?…؟۔।॥])["'”’»)\]*_]{0,3}[ \t\u00a0\u3000]+(?=[^\sa-z])"""
    r"""|(?<=[。！？｡])[」』”’）》】]{0,3}(?=[^\s。！？｡」』”’）》】])"""
)
_NO_END = re.compile(
    r"(?:^[ \t]*\d{1,3}|\b(?:[A-Z]|Dr|Mr|Mrs|Ms|St|Prof|Inc|Fig|vs|No|e\.g|i\.e))\.\Z", re.MULTILINE
)
_BREAK = re.compile(f"[{BREAKS}]")
