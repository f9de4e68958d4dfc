"""A thread beside a memory that works until it is done, or asked to stop."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable


class BackgroundThread(ABC):
    """A daemon thread.

    Args:
        wake: has it look whether it is to end, where it waits for work.

    Attributes:
        stopping: set when it is to end; it looks between two pieces of work.
    """

    def __init__(self, name: str, wake: Callable[[], None] | None = None) -> None:
        self.stopping = threading.Event()
        self._wake = wake
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    @abstractmethod
    def run(self) -> None:
        """In the thread."""

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Waits until it has ended."""
        self.stopping.set()
        if self._wake is not None:
            self._wake()
        if self._thread.is_alive():
            self._thread.join()
