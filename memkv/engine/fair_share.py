"""Time for several kinds of work, in equal shares."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Kind = TypeVar("Kind", bound=Hashable)


class FairShare(Generic[Kind]):
    """The kind of work that had the least time goes next; who had nothing to do saves nothing up."""

    def __init__(self) -> None:
        self._used: dict[Kind, float] = {}  # seconds
        self._ready: set[Kind] = set()

    def choose(self, ready: Sequence[Kind]) -> Kind:
        """One of `ready`, which is not empty; the first of equals."""
        floor = min((self._used[kind] for kind in ready if kind in self._ready), default=0.0)
        for kind in ready:
            used = self._used.get(kind, 0.0)
            self._used[kind] = used if kind in self._ready else max(used, floor)
        self._ready = set(ready)
        return min(ready, key=lambda kind: self._used[kind])

    def charge(self, kind: Kind, seconds: float) -> None:
        self._used[kind] = self._used.get(kind, 0.0) + seconds
