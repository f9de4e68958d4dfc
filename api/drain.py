"""How a server stops: new requests are refused, running ones finish, what outlasts the deadline is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkv.memory.administration import Restoration


class Drain:
    """Counts running requests and knows whether the server is about to stop.

    `running` -> `draining` (new requests get 503) -> `cut` (what still runs ends with an error of its own).
    Only the event loop's thread uses it, except `begin`, which a signal handler may call.

    Args:
        serves_again: whether somebody restores a snapshot once nothing runs any more, and serves again.

    Attributes:
        restoration: what is to be restored before that.
    """

    def __init__(self, *, serves_again: bool = False) -> None:
        self.serves_again = serves_again
        self.restoration: Restoration | None = None
        self.draining = False
        self.running = 0
        self._cut = asyncio.Event()

    def begin(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True

    def restore(self, restoration: Restoration) -> None:
        """Refuses new requests from now on, for a snapshot is to be restored: not where the server stops."""
        if not self.draining:
            self.restoration = restoration
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
