"""Texts that come out at an exact number of tokens, so that a measurement says what it measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from memkv.errors import ModelError

# Common words, one token each in most vocabularies, some of two, and the shortest there are.
_TEXT = (
    "water light house stone river market winter summer letter garden window bridge harbor "
    "island morning evening doctor teacher student farmer captain sailor engine wheel paper iron "
    "silver bread salt sugar music story north south east west small large early late cold warm "
    "quiet simple common public second third million lighthouse riverbank stonework breadbasket "
    "harborside a I"
)
_WORDS = _TEXT.split()
_SENTENCE = 11  # words
_STEPS = 1000


def text_of(num_tokens: int, count: Callable[[str], int], seed: int) -> str:
    """A text of sentences for which `count(text) == num_tokens`; another seed gives another text.

    Raises:
        ModelError: no such text was found.
    """
    source = random.Random(seed)
    words = [source.choice(_WORDS)]
    for _ in range(_STEPS):
        text = _sentences(words)
        found = count(text)
        if found == num_tokens:
            return text
        if found > num_tokens:
            del words[-source.randint(1, 3) :]
        else:
            tokens_per_word = max(1.0, found / max(1, len(words)))
            missing = int((num_tokens - found) / tokens_per_word * 0.9)
            words += [source.choice(_WORDS) for _ in range(max(1, missing))]
    raise ModelError(
        f"no text of exactly {num_tokens} tokens was found for this tokenizer", hint="measure another model"
    )


def _sentences(words: Sequence[str]) -> str:
    pieces = [words[start : start + _SENTENCE] for start in range(0, len(words), _SENTENCE)]
    return " ".join(f"{' '.join(piece).capitalize()}." for piece in pieces)
