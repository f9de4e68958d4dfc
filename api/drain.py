"""How a server stops: new requests are refused, running ones finish, what outlasts the deadline is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Drain:
    """Counts running requests and knows whether the server is about to stop.

    `running` -> `draining` (new requests get 503) -> `cut` (what still runs ends with an error of its own).
    Only the event loop's thread uses it, except `begin`, which a signal handler may call.
    """

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._cut = asyncio.Event()

    def begin(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True

    def cut(self) -> None:
        """Ends what still runs."""
        self.draining = True
        self._cut.set()

    @property
    def is_cut(self) -> bool:
        return self._cut.is_set()

    async def wait_cut(self) -> None:
        """Returns when running requests have to end."""
        await self._cut.wait()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A request that the drain waits for."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
