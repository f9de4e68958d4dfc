"""An engine that is held where an ingest asks for its N-th batch, so that a job can be met in its middle."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memkv.memory import Memory


class HeldEngine:
    """Attributes:
    reached: set once the engine is held.
    open: to be set for it to go on.
    """

    def __init__(self, memory: Memory, monkeypatch: pytest.MonkeyPatch, *, at_batch: int = 1) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._batches = 0
        engine = memory._parts.engine
        prefill = engine.prefill

        def held(prefix: Any, refs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
            self._batches += 1
            if self._batches == at_batch:
                self.reached.set()
                assert self.open.wait(30)
            return prefill(prefix, refs, *arguments, **options)

        monkeypatch.setattr(engine, "prefill", held)
