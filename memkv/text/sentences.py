# ruff: noqa: RUF001  (the punctuation of other scripts is what this file is about)
"""Where sentences end, in running text of most scripts.

A rule of thumb, not a parser: a full stop and a blank in front of anything but a small letter. "Dr. Smith"
is cut too, which costs a chunk border or a citation nothing that matters.
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
_BREAK = re.compile(f"[{BREAKS}]")
