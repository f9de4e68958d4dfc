"""The sign of life of the jobs that run in this process, given while one long piece of work says nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from memkv.errors import MemKVError, StoreFenced

_log = structlog.get_logger(__name__)


class Heartbeat:
    """A thread that calls `beat` again and again, until `stop` or until the store is another process's.

    Nothing is decided by how old a heartbeat is: who holds the store's lock decides which jobs are alive.
    """

    def __init__(self, beat: Callable[[], None], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="memkv-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stopping.wait(self._seconds):
            try:
                self._beat()
            except StoreFenced:
                return
            except MemKVError as error:  # the database is busy or away: the next beat may come through
                _log.warning("heartbeat_missed", code=error.code, detail=error.detail)
