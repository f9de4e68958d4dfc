"""How many threads torch and the kernels compute on: as configured, or as measured."""

from __future__ import annotations

import statistics
import time

import torch

from memkv.kernels import ops

_BUDGET_SECONDS = 0.2
_SHAPES = ((1, 9), (128, 3))  # rows of a step, repetitions: one answer, a piece of a prompt
_WORTHWHILE = 0.95  # more threads must take at most this share of the time


def use_threads(configured: int, hidden_size: int) -> int:
    """Sets the number of threads for the calling thread's work, and returns it. 0: measures 1, 2, 4 ...

    A core that somebody else keeps busy makes two threads slower than one: the number of cores says little.
    torch keeps the number by thread, so the one that computes has to call this.
    """
    count = configured or _measure(int(torch.get_num_threads()), hidden_size)
    torch.set_num_threads(count)
    ops.set_num_threads(count)
    return count


def _measure(limit: int, hidden_size: int) -> int:
    counts = sorted({limit, *(1 << power for power in range(limit.bit_length()))})
    if len(counts) == 1:
        return limit
    weight = torch.ones((hidden_size, 4 * hidden_size))
    inputs = [(torch.ones((rows, hidden_size)), repetitions) for rows, repetitions in _SHAPES]
    deadline = time.perf_counter() + _BUDGET_SECONDS
    best, best_seconds = counts[0], [float("inf")] * len(inputs)
    for count in counts:
        torch.set_num_threads(count)
        seconds = [_seconds(rows, weight, repetitions) for rows, repetitions in inputs]
        ratio = 1.0
        for new, old in zip(seconds, best_seconds, strict=True):
            ratio *= new / old
        if ratio <= _WORTHWHILE ** len(inputs):
            best, best_seconds = count, seconds
        if time.perf_counter() > deadline:
            break
    return best


def _seconds(rows: torch.Tensor, weight: torch.Tensor, repetitions: int) -> float:
    rows @ weight  # the first one starts threads
    taken = []
    for _ in range(repetitions):
        started = time.perf_counter()
        rows @ weight
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
