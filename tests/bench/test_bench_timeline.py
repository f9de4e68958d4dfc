"""The timeline of a first token: what went on at the same time stands below each other."""

from __future__ import annotations

from memkv.bench.timeline import Span, drawn, timeline_of, verify_share
from memkv.engine.generation import Timings
from memkv.engine.timeline import Event
from memkv.store.chunk_store import LoadTimes

LOADS = [LoadTimes(6.0, 7.0, 7.5), LoadTimes(8.125, 8.375, 8.5), LoadTimes(8.25, 8.5, 8.625)]
EVENTS = [Event("to the device", 8.5, 8.75), Event("fresh pass", 8.75, 9.0), Event("token", 9.0, 9.5)]
TIMINGS = Timings(queue_ms=125.0, ttft_ms=1000.0)
FOUND = timeline_of(EVENTS, LOADS, 8.0, TIMINGS, (32_768, "select:0.1", "disk"))


def test_spans_are_from_the_request_to_its_first_token_and_one_where_they_overlap() -> None:
    names = ["queued", "read", "verified", "to the device", "fresh pass"]
    assert [span.what for span in FOUND.events] == names
    times = [time for span in FOUND.events for time in (span.start_ms, span.end_ms)]
    assert times == [0, 125, 125, 500, 375, 625, 500, 750, 750, 1000]


def test_what_is_apart_stays_apart() -> None:
    events = [Event("looking pass", 8.25, 8.5), Event("looking pass", 8.5625, 8.75)]
    found = timeline_of(events, [], 8.0, TIMINGS, (1, "select:0.1", "host"))
    assert found.events[1:] == [Span("looking pass", 250, 500), Span("looking pass", 562.5, 750)]


def test_it_is_drawn_to_scale() -> None:
    assert (
        drawn(FOUND, width=16)
        == """\
select:0.1 over 32,768 tokens from disk: 1000.0 ms
queued           |##              | 0.0 to 125.0 ms
read             |  ######        | 125.0 to 500.0 ms
verified         |      ####      | 375.0 to 625.0 ms
to the device    |        ####    | 500.0 to 750.0 ms
fresh pass       |            ####| 750.0 to 1000.0 ms"""
    )


def test_what_verification_takes_of_loads() -> None:
    assert verify_share(LOADS[1:]) == 0.25 / 0.75
    assert verify_share([]) == 0.0
