"""What a lane does, and when, while somebody wants to know: copies, and passes through the model."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import torch

from memkv.engine.stopwatch import Stopwatch


class Event(NamedTuple):
    """From when to when something went on, in seconds of `time.monotonic`."""

    what: str
    start: float
    end: float


class Timeline:
    """Notes nothing unless it is started. Any thread may note; the rest belongs to the engine's."""

    def __init__(self) -> None:
        self._origin: tuple[Stopwatch, float] | None = None  # and when it was started
        self._lock = threading.Lock()  # guards what follows
        self._events: list[Event] = []
        self._watched: list[tuple[str, Stopwatch]] = []

    @property
    def is_on(self) -> bool:
        return self._origin is not None

    def start(self, device: torch.device) -> None:
        """The device must be idle: its times are counted from when it gets to this."""
        self._origin = Stopwatch(device), time.monotonic()

    def note(self, what: str, start: float) -> None:
        """Something that the host did until now."""
        with self._lock:
            self._events.append(Event(what, start, time.monotonic()))

    def watch(self, what: str, watch: Stopwatch) -> None:
        """Something that the device does; `watch` is stopped."""
        if self.is_on:
            with self._lock:
                self._watched.append((what, watch))

    def stop(self) -> list[Event]:
        """What went on since the start, without order; waits for the device."""
        assert self._origin is not None, "bug: a timeline was stopped before it was started"
        origin, started = self._origin
        self._origin = None
        with self._lock:
            events, self._events = self._events, []
            watched, self._watched = self._watched, []
        for what, watch in watched:
            start, end = watch.span(origin)
            events.append(Event(what, started + start, started + end))
        return events
