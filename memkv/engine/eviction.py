"""What goes first when room is needed: that of which the fewest tokens would be missed for its bytes.

    worth     = uses * cost of computing it / bytes
    priority  = worth + the priority of what went last when it was last used (GreedyDual-Size-Frequency)

so that what was used often, but long ago, goes in the end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

# Tokens to attend to that cost as much as the products with the weights, for one token: parameters / (2 *
# layers * heads * head_dim), which is 3,900 for SmolLM2-135M and 30,000 for Llama-3.1-8B.
_ATTENDED_PER_TOKEN = 8000


def worth(uses: int, num_tokens: int, position: int, num_blocks: int) -> float:
    """Of a chunk that begins at a position."""
    cost = num_tokens * (1 + (position + num_tokens / 2) / _ATTENDED_PER_TOKEN)
    return uses * cost / num_blocks


class EvictionOrder(Generic[Item]):
    """What may go. Of equals, the one that was added first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []  # with entries of what was taken out since
        self._numbers = itertools.count()
        self._current: dict[Item, int] = {}  # the number of its entry
        self._clock = 0.0

    def add(self, item: Item, worth: float) -> None:
        """Takes an item in that is not here. Worth 0 goes before all that has any."""
        number = next(self._numbers)
        self._current[item] = number
        heapq.heappush(self._heap, (self._clock + worth, number, item))

    def discard(self, item: Item) -> bool:
        """Takes an item out; False where it is not here."""
        found = self._current.pop(item, None) is not None
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        return found

    def pop(self) -> Item:
        """Takes out what goes first."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                self._clock, _, item = entry
                del self._current[item]
                return item

    def __contains__(self, item: object) -> bool:
        return item in self._current

    def __iter__(self) -> Iterator[Item]:
        return iter(self._current)

    def __len__(self) -> int:
        return len(self._current)

    def _is_current(self, entry: tuple[float, int, Item]) -> bool:
        return self._current.get(entry[2]) == entry[1]
