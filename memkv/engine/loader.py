"""Threads that read and write chunks, so that the engine's own never waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from memkv.engine.residency import ChunkRef, KVSource
from memkv.kv.chunk import ChunkKV

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
NUM_THREADS = 8

ReadOutcome = ChunkKV | Exception | None


class Loader:
    """A few daemon threads over one queue: a read that never returns holds up no engine and no exit."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"memkv-loader-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, ref: ChunkRef, source: KVSource, done: Callable[[ReadOutcome], None]) -> None:
        """Reads a chunk and hands what came of it to `done`, in a loader thread."""

        def work() -> None:
            try:
                outcome: ReadOutcome = source.read(ref)
            except Exception as error:  # noqa: BLE001  # the thread's top: it goes to who asked
                outcome = error
            done(outcome)

        self._work.put(work)

    def write(self, ref: ChunkRef, source: KVSource, kv: ChunkKV) -> None:
        """Keeps a chunk. A failure is logged and costs nothing but the next prefill of it."""

        def work() -> None:
            try:
                source.write(ref, kv)
            except Exception:  # noqa: BLE001  # the thread's top: nobody asked for the outcome
                _log.warning("a healed chunk could not be kept: %s", ref.input_key, exc_info=True)

        self._work.put(work)

    def run(self, work: Callable[[], None]) -> None:
        """Does something else that takes too long for the engine's thread; it must not raise."""
        self._work.put(work)

    def close(self) -> None:
        """Finishes what is queued, unless it takes too long."""
        for _ in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
