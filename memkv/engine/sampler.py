"""From logits to the next token of each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memkv.engine.staging import to_device
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


def sample(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[Callable[[], float]]) -> Tensor:
    """The next token of each row, on the logits' device and without waiting for it.

    A row that is not greedy is drawn by inverting its cumulated probabilities at a number of its own: its
    neighbours cannot change what it draws.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        samplings: of each row.
        draws: of each row, for a number in [0, 1); not called where the row is greedy.

    Returns:
        int64 [num_rows]; -1 where a row has no finite maximum.
    """
    best, tokens = logits.max(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    cut = [row for row in drawn if samplings[row].top_k or samplings[row].top_p < 1]
    for rows, draw in ((cut, _draw_from_likeliest), ([row for row in drawn if row not in cut], _draw)):
        if rows:
            settings = [_settings(samplings[row], logits.shape[1], draws[row]()) for row in rows]
            host = (np.array(rows), np.array(settings, dtype=np.float64))
            index, moved = to_device(host, logits.device)
            tokens[index] = draw(logits[index].float(), moved)
    return torch.where(torch.isfinite(best), tokens, -1)


def _settings(sampling: Sampling, vocab_size: int, number: float) -> tuple[float, float, float, float]:
    """temperature, top_k, top_p, and the number in [0, 1) to draw by."""
    return sampling.temperature, sampling.top_k or vocab_size, sampling.top_p, number


def _draw(logits: Tensor, settings: Tensor) -> Tensor:
    """One token of each row of logits [n, vocab_size], from all of them."""
    return _pick(_weights(logits, logits.amax(dim=-1, keepdim=True), settings), settings)


def _draw_from_likeliest(logits: Tensor, settings: Tensor) -> Tensor:
    """One token of each row of logits [n, vocab_size], from its top_k that make up top_p."""
    logits, ids = logits.sort(dim=-1, descending=True, stable=True)  # of equals the first, in any company
    weights = _weights(logits, logits[:, :1], settings)
    rank = torch.arange(logits.shape[1], device=logits.device)
    weights = weights.where(rank < settings[:, 1:2], 0.0)
    total = weights.cumsum(dim=-1)
    inside = total[:, :-1] < settings[:, 2:3] * total[:, -1:]  # as far as the tokens before do not suffice
    weights[:, 1:] = weights[:, 1:].where(inside, 0.0)
    return ids.gather(1, _pick(weights, settings)[:, None]).squeeze(1)


def _weights(logits: Tensor, best: Tensor, settings: Tensor) -> Tensor:
    # float64: tens of thousands of small probabilities are added up
    return torch.exp((logits.double() - best) / settings[:, :1])


def _pick(weights: Tensor, settings: Tensor) -> Tensor:
    """Where each row's cumulated weights pass its number."""
    total = weights.cumsum(dim=-1)
    place = torch.searchsorted(total, settings[:, 3:4] * total[:, -1:], right=True).squeeze(1)
    return place.clamp_max(weights.shape[1] - 1)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(valid: bool, name: str, value: object, hint: str) -> None:
    if not valid:
        raise BadRequestError(f"{name} = {value!r} is not possible", hint=hint)
