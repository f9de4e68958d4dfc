"""Which chunks an answer rests on, found in the words after generation.

A sentence of the answer is compared with every sentence, and pair of neighbouring sentences, of the mapped
chunks. The score is the share of the sentence's weight that is found there. Words weigh by how few of the
chunks have them, digits and names more, function words nothing; two neighbouring words count once more as a
pair. What no chunk says still counts below the line, so that an invented sentence scores low however many
common words it shares.

A lexical measure misses paraphrase; it never cites what does not stand in the chunk.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from memkv.text.sentences import sentence_spans

FLOOR = 0.3  # below this share nothing is cited
MAX_SOURCES = 3


@dataclass(frozen=True, slots=True)
class CitableChunk:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CitedSource:
    """`text[quote_start:quote_end]` of the chunk with this index supports the sentence; score in (0, 1]."""

    index: int
    quote_start: int
    quote_end: int
    score: float


@dataclass(frozen=True, slots=True)
class AlignedSentence:
    """A sentence of the answer, answer[start:end], and what supports it, best first; never empty."""

    start: int
    end: int
    sources: tuple[CitedSource, ...]


def align(
    answer: str, chunks: Sequence[CitableChunk], *, floor: float = FLOOR, max_sources: int = MAX_SOURCES
) -> list[AlignedSentence]:
    """The sentences of `answer` that some chunk supports, in order.

    A chunk is named beside the best one only if it supports the sentence nearly as well.
    """
    passages = _Passages(chunks)
    aligned = []
    for start, end in sentence_spans(answer):
        sources = passages.sources_of(answer[start:end], floor, max_sources)
        if sources:
            aligned.append(AlignedSentence(start, end, sources))
    return aligned


@dataclass(frozen=True, slots=True)
class _Sentence:
    chunk: int  # position in the list of chunks
    start: int
    end: int


class _Passages:
    """The sentences of all chunks, by the features that they hold."""

    def __init__(self, chunks: Sequence[CitableChunk]) -> None:
        self._chunks = chunks
        self._sentences: list[_Sentence] = []
        self._holders: dict[str, list[int]] = defaultdict(list)  # feature -> sentences, in rising order
        chunks_with: Counter[str] = Counter()
        for position, chunk in enumerate(chunks):
            seen: set[str] = set()
            for start, end in sentence_spans(chunk.text):
                features = set(_features(chunk.text[start:end]))
                for feature in features:
                    self._holders[feature].append(len(self._sentences))
                self._sentences.append(_Sentence(position, start, end))
                seen |= features
            chunks_with.update(seen)
        self._rarity = {f: 1.0 + math.log((len(chunks) + 1) / (n + 1)) for f, n in chunks_with.items()}
        self._unseen = 1.0 + math.log((len(chunks) + 1) / 2)

    def sources_of(self, sentence: str, floor: float, max_sources: int) -> tuple[CitedSource, ...]:
        weights = {f: w * self._rarity.get(f, self._unseen) for f, w in _features(sentence).items()}
        total = sum(weights.values())
        if not total:
            return ()
        alone, paired = self._found(weights)
        best: dict[int, CitedSource] = {}
        for first, found in alone.items():
            self._offer(best, first, first, found / total)
        for first, found in paired.items():
            self._offer(best, first, first + 1, found / total - _PAIR_COST)
        ordered = sorted(best.values(), key=lambda source: (-source.score, source.index))
        enough = max(floor, _NEARLY * ordered[0].score) if ordered else floor
        return tuple(source for source in ordered[:max_sources] if source.score >= enough)

    def _found(self, weights: dict[str, float]) -> tuple[dict[int, float], dict[int, float]]:
        """The weight found in each sentence, and in each sentence together with the next of its chunk."""
        alone: dict[int, float] = defaultdict(float)
        paired: dict[int, float] = defaultdict(float)
        for feature, weight in weights.items():
            previous = -1
            for holder in self._holders.get(feature, ()):
                alone[holder] += weight
                if self._has_next(holder):
                    paired[holder] += weight
                if holder - 1 != previous and holder and self._has_next(holder - 1):
                    paired[holder - 1] += weight
                previous = holder
        return alone, paired

    def _has_next(self, sentence: int) -> bool:
        following = sentence + 1
        return (
            following < len(self._sentences)
            and self._sentences[following].chunk == self._sentences[sentence].chunk
        )

    def _offer(self, best: dict[int, CitedSource], first: int, last: int, score: float) -> None:
        chunk = self._sentences[first].chunk
        if chunk not in best or score > best[chunk].score:
            start, end = self._sentences[first].start, self._sentences[last].end
            best[chunk] = CitedSource(self._chunks[chunk].index, start, end, min(score, 1.0))


_PAIR_COST = 0.1  # what a second sentence must add before the quote grows by it
_NEARLY = 0.8
_NUMBER_WEIGHT, _NAME_WEIGHT, _PAIR_WEIGHT = 1.5, 1.3, 1.0
_WORD = re.compile(r"\d[\d.,:/-]*\d|\d|[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]+"
)
_FUNCTION_WORDS = frozenset(
    """
    a about above after again all also am an and any are as at be because been before being below
    between both but by can could did do does doing down during each few for from further had has have
    having he her here hers him his how i if in into is it its itself just may me might more most must
    my no nor not now of off on once only or other our out over own same shall she should so some such
    than that the their them then there these they this those through to too under until up upon us very
    was we were what when where which while who whom why will with would yes you your
    """.split()  # noqa: SIM905  (a list of 140 lines says no more)
)


def _features(text: str) -> dict[str, float]:
    """Stems, numbers, and pairs of neighbouring stems, each with the weight of its kind."""
    features: dict[str, float] = {}
    last = ""
    for position, token in enumerate(_tokens(text)):
        stem = _stem(token)
        if token[0].isdigit():
            weight = _NUMBER_WEIGHT
        elif token.lower() in _FUNCTION_WORDS:
            last = ""
            continue
        else:
            weight = _NAME_WEIGHT if position and token[0].isupper() else 1.0
        features[stem] = max(weight, features.get(stem, 0.0))
        if last:
            features[f"{last} {stem}"] = _PAIR_WEIGHT
        last = stem
    return features


def _tokens(text: str) -> Iterable[str]:
    """Words and numbers; of scripts without blanks, every two neighbouring characters."""
    for match in _WORD.finditer(text):
        word = match.group()
        if word.isascii() or len(word) == 1 or not _UNSPACED.match(word):
            yield word
        else:
            yield from (word[i : i + 2] for i in range(len(word) - 1))


@lru_cache(maxsize=8192)
def _stem(token: str) -> str:
    """Lower case without the commonest English endings; numbers without their commas."""
    if token[0].isdigit():
        return token.replace(",", "")
    word = token.casefold().replace("\u2019", "'").removesuffix("'s")
    for ending, rest in (("ies", "y"), ("ing", ""), ("ed", ""), ("es", ""), ("s", "")):
        if word.endswith(ending) and len(word) - len(ending) >= 4 and not word.endswith("ss"):
            return word.removesuffix(ending) + rest
    return word
