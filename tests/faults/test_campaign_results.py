"""Results of campaigns that run at the same time are all kept, in the figures' order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import campaign
import pytest
from fault_place import POSTGRESQL, SQLITE


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
