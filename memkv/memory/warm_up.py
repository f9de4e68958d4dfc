"""What questions mapped most is loaded when a memory is opened, while nobody asks anything of the engine."""

from __future__ import annotations

import structlog

from memkv.errors import EngineClosed, MemKVError
from memkv.memory.background_thread import BackgroundThread
from memkv.memory.collections import Collections
from memkv.memory.parts import Parts
from memkv.memory.preloading import preload

_log = structlog.get_logger(__name__)

_PAUSE_SECONDS = 0.02  # between two looks at whether the engine is idle
_MOST_CHUNKS = 10_000  # that are looked at


class _Stopped(Exception):
    """The thread was asked to stop between two chunks."""


class WarmUp(BackgroundThread):
    """Ends by itself, or before the next chunk."""

    def __init__(self, parts: Parts, collections: Collections) -> None:
        super().__init__("memkv-warm-up")
        self._parts = parts
        self._collections = collections

    def run(self) -> None:
        if not self._parts.config.engine.warm_share:
            return
        try:
            files = self._parts.store.catalog.most_used_files(_MOST_CHUNKS)
            loaded = preload(self._parts, self._collections, files, self._wait)
        except (_Stopped, EngineClosed):
            return
        except MemKVError as error:  # questions load what they need themselves
            _log.warning("warm_up_ended", code=error.code, detail=error.detail)
            return
        if loaded:
            _log.info("warmed_up", chunks=loaded)

    def _wait(self, loaded: int) -> None:
        while not self._parts.engine.is_idle():
            if self.stopping.wait(_PAUSE_SECONDS):
                raise _Stopped
