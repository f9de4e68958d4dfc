"""From logits to the next token of each sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from memkv.errors import BadRequestError

_MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer is drawn. Raises `BadRequestError` on a value out of range.

    Attributes:
        max_tokens: at least 1; the answer ends there with finish reason "length".
        temperature: 0 to 2; 0 is greedy.
        top_k: only the k likeliest tokens; 0 is all of them.
        top_p: only the likeliest tokens whose probabilities add up to p; above 0, 1 is all of them.
        seed: the same seed and logits give the same tokens, whatever else runs; None draws a new one.
        stop: texts that end the answer and are not part of it.
        ignore_eos: goes on past the model's own end of text, for measurements.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1"
        )
        _require(
            _is_number(self.temperature) and 0 <= self.temperature <= 2,
            "temperature",
            self.temperature,
            "0 (greedy) to 2",
        )
        _require(
            _is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "at least 1, or 0 for all tokens"
        )
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        _require(self.seed is None or _is_int(self.seed), "seed", self.seed, "an integer or none")
        valid_stop = (
            isinstance(self.stop, tuple)
            and len(self.stop) <= _MAX_STOPS
            and all(isinstance(text, str) and text for text in self.stop)
        )
        _require(valid_stop, "stop", self.stop, f"at most {_MAX_STOPS} texts, none of them empty")


def sample(logits: Tensor, samplings: Sequence[Sampling], randoms: Sequence[Random]) -> list[int | None]:
    """The next token of each row; None where a row has no finite maximum.

    Greedy rows are taken in one pass. Every other row is drawn by itself by inverting its cumulated
    probabilities at one number of its own generator: its neighbours cannot change what it draws.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        samplings: of each row.
        randoms: of each row; untouched where the row is greedy.
    """
    best, greedy = logits.max(dim=-1)
    finite = torch.isfinite(best).tolist()
    tokens: list[int | None] = list(greedy.tolist())
    for row, sampling in enumerate(samplings):
        if not finite[row]:
            tokens[row] = None
        elif sampling.temperature > 0:
            tokens[row] = _draw(logits[row].float(), sampling, randoms[row].random())
    return tokens


def _draw(logits: Tensor, sampling: Sampling, number: float) -> int:
    """One token of logits [vocab_size], by a number in [0, 1)."""
    vocab_size = logits.shape[0]
    kept = min(sampling.top_k, vocab_size) if sampling.top_k else vocab_size
    ids: Tensor | None = None
    if kept < vocab_size:
        logits, ids = logits.topk(kept)
    elif sampling.top_p < 1:
        logits, ids = logits.sort(descending=True)
    # float64: tens of thousands of small probabilities are added up
    weights = torch.softmax((logits.double() - logits.max()) / sampling.temperature, dim=-1)
    total = weights.cumsum(dim=-1)
    if sampling.top_p < 1:
        inside = int(torch.searchsorted(total, sampling.top_p * float(total[-1]))) + 1
        total = total[:inside]
    place = int(torch.searchsorted(total, number * float(total[-1]), right=True))
    place = min(place, total.shape[0] - 1)
    return place if ids is None else int(ids[place])


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(valid: bool, name: str, value: object, hint: str) -> None:
    if not valid:
        raise BadRequestError(f"{name} = {value!r} is not possible", hint=hint)
