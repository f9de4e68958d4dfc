"""How long a device works on something."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Runs from its making to `stop`: what a device is given in between. Nobody waits before `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._events: list[Any] = []  # torch.cuda.Event, which has no types
        self._times: list[float] = []
        self._note()

    def stop(self) -> None:
        self._note()

    @property
    def is_over(self) -> bool:
        """Whether the device is done with it."""
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        """Until the device is done with what came before the last note."""
        for event in self._events[-1:]:
            event.synchronize()

    def seconds(self) -> float:
        """Waits until the device is done."""
        if not self._events:
            return self._times[1] - self._times[0]
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def span(self, origin: Stopwatch) -> tuple[float, float]:
        """When it began and ended, in seconds from the making of another one. Waits for the device."""
        if not self._events:
            began = origin._times[0]
            return self._times[0] - began, self._times[1] - began
        self._events[-1].synchronize()
        begin, end = (float(origin._events[0].elapsed_time(event)) / 1e3 for event in self._events)
        return begin, end

    def _note(self) -> None:
        if self._stream is None:
            self._times.append(time.monotonic())
            return
        self._events.append(self._stream.record_event(_event()))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
