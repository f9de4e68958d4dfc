"""How many threads torch and the kernels compute on: as configured, or as measured, each for itself."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from memkv.kernels import ops

_BUDGET_SECONDS = 0.5
_SHAPES = (1, 128)  # rows of a step: one answer, a piece of a prompt
_WORTHWHILE = 0.95  # more threads must take at most this share of the time


@dataclass(frozen=True, slots=True)
class Threads:
    """0: not measured yet."""

    torch: int
    kernels: int


def use_threads(configured: int, hidden_size: int) -> Threads:
    """Sets the number of threads for the calling thread's work, and returns it. 0: measures 1, 2, 4 ...

    A core that somebody else keeps busy makes two threads slower than one: the number of cores says little.
    torch keeps the number by thread, so the one that computes has to call this.
    """
    limit = int(torch.get_num_threads())
    count = configured or _measure(limit, hidden_size)
    torch.set_num_threads(count)
    if configured:
        ops.set_num_threads(configured)
        return Threads(count, configured)
    return Threads(count, ops.calibrate_threads(limit))


def _measure(limit: int, hidden_size: int) -> int:
    """Rounds over all counts, so that what else the machine does falls on each alike."""
    counts = sorted({limit, *(1 << power for power in range(limit.bit_length()))})
    if len(counts) == 1:
        return limit
    weight = torch.ones((hidden_size, 4 * hidden_size))
    inputs = [torch.ones((rows, hidden_size)) for rows in _SHAPES]
    taken: dict[tuple[int, int], list[float]] = {}
    for count in counts:  # the first passes start threads
        _seconds(count, inputs[0], weight)
    deadline = time.perf_counter() + _BUDGET_SECONDS
    while not taken or time.perf_counter() < deadline:
        for count in counts:
            for index, rows in enumerate(inputs):
                taken.setdefault((count, index), []).append(_seconds(count, rows, weight))
    best, best_cost = counts[0], float("inf")
    for count in counts:
        cost = 1.0
        for index in range(len(inputs)):
            cost *= statistics.median(taken[count, index])
        if cost <= best_cost * _WORTHWHILE ** len(inputs):
            best, best_cost = count, cost
    return best


def _seconds(count: int, rows: torch.Tensor, weight: torch.Tensor) -> float:
    torch.set_num_threads(count)
    rows @ weight  # threads that have slept wake up
    started = time.perf_counter()
    rows @ weight
    return time.perf_counter() - started
