"""What happens between a request and its first token, and what of it at the same time.

read             ##############################
verified           # # # # # # # # # # # # # #
to the device       ############################
looking pass                                    #
fresh pass                                       ############
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from memkv.engine.generation import Timings
from memkv.engine.timeline import Event
from memkv.store.chunk_store import LoadTimes

_ORDER = ("queued", "read", "verified", "to the host pool", "to the device", "looking pass", "fresh pass")
_GAP = 1 / 400  # of the whole: what is no further apart is one


class Span(msgspec.Struct, frozen=True):
    """When something went on, for one chunk or for several; milliseconds from the request."""

    what: str
    start_ms: float
    end_ms: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request; `ms` until its first token."""

    context: int
    policy: str
    tier: str
    ms: float
    events: list[Span]


def timeline_of(
    events: Iterable[Event],
    loads: Iterable[LoadTimes],
    asked: float,
    timings: Timings,
    name: tuple[int, str, str],
) -> Timeline:
    """Of what an engine and a store noted since a request was `asked` for; `name`: context, policy, tier."""
    context, policy, tier = name
    everything = [Event("queued", asked, asked + timings.queue_ms / 1e3), *events]
    for load in (load for load in loads if load.began >= asked):
        everything += [Event("read", load.began, load.read), Event("verified", load.read, load.verified)]
    seconds = timings.ttft_ms / 1e3
    spans = [
        Span(what, 1e3 * (start - asked), 1e3 * (end - asked))
        for what in _ORDER
        for start, end in _merged([event for event in everything if event.what == what], seconds * _GAP)
    ]
    return Timeline(context=context, policy=policy, tier=tier, ms=timings.ttft_ms, events=spans)


def verify_share(loads: Sequence[LoadTimes]) -> float:
    """Of all seconds of loads, those that verified; 0 without loads."""
    whole = sum(load.verified - load.began for load in loads)
    return sum(load.verified - load.read for load in loads) / whole if loads else 0.0


def drawn(timeline: Timeline, width: int = 64) -> str:
    """A line for everything that happened, to scale."""
    scale = width / max(timeline.ms, *(span.end_ms for span in timeline.events))
    lines = [f"{timeline.policy} over {timeline.context:,} tokens from {timeline.tier}: {timeline.ms:.1f} ms"]
    for what in _ORDER:
        spans = [span for span in timeline.events if span.what == what]
        if spans:
            marks = [" "] * width
            for span in spans:
                first = min(int(span.start_ms * scale), width - 1)
                end = max(first + 1, round(span.end_ms * scale))
                marks[first:end] = "#" * (end - first)
            times = f"{spans[0].start_ms:.1f} to {spans[-1].end_ms:.1f} ms"
            lines.append(f"{what:<16} |{''.join(marks)}| {times}")
    return "\n".join(lines)


def _merged(events: list[Event], gap: float) -> list[tuple[float, float]]:
    """When at least one of them went on."""
    found: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if found and event.start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], event.end)
        else:
            found.append((event.start, event.end))
    return found
