"""Means over questions, with how far they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

_RESAMPLES = 10_000


class Estimate(msgspec.Struct, frozen=True):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of paired differences and its percentile bootstrap interval, over questions.

    Of few questions it says little. (Efron and Tibshirani, An introduction to the bootstrap, 1993.)

    Raises ValueError without values.
    """
    sample = np.asarray(values, dtype=np.float64)
    if not len(sample):
        raise ValueError("a mean of nothing")
    source = np.random.default_rng(seed)
    means = np.concatenate(
        [
            sample[source.integers(0, len(sample), (500, len(sample)))].mean(axis=1)
            for _ in range(_RESAMPLES // 500)
        ]
    )
    low, high = np.percentile(means, (2.5, 97.5))
    return Estimate(float(sample.mean()), float(low), float(high))
