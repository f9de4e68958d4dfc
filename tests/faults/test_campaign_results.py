"""Results of campaigns that run at the same time are all kept, in the figures' order."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import campaign
import pytest
from fault_place import POSTGRESQL, SQLITE, Outcome, Place


def test_results_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "RESULTS", tmp_path / "results.json")
    expected = [
        {"figure": name, "database": database, "runs": 2}
        for name in campaign.FIGURES
        for database in (SQLITE, POSTGRESQL)
    ]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(campaign.keep, [{**each, "runs": 1} for each in expected]))
        list(threads.map(campaign.keep, reversed(expected)))
    assert campaign.kept_results() == expected


def test_a_figure_that_is_interrupted_says_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        database = SQLITE
        ending = threading.Event()
        repetitions = Place.repetitions

    def kills(place: Interrupted, *, kills: int) -> Outcome:
        outcome = Outcome()
        for kill in place.repetitions(kills):  # type: ignore[misc]
            outcome.runs += 1
            if kill == 2:
                signal.raise_signal(signal.SIGINT)
        return outcome

    monkeypatch.setattr(campaign, "REPEATED", (kills,))
    monkeypatch.setitem(campaign.FIGURES, "kills", campaign.Figure(kills, {"kills": 500}))
    place = Interrupted()
    before = signal.getsignal(signal.SIGINT)
    try:
        campaign._end_on_interrupt(place)  # type: ignore[arg-type]
        found = campaign.run_figure("kills", place, 1.0)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)
    assert (found["runs"], found["sizes"]) == (3, {"kills": 3})
