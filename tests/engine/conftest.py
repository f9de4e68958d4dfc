"""Some modules run every test twice: with a device that is waited for, and one that works on its own."""

from __future__ import annotations

import pytest
from engine_harness import run_ahead

AHEAD = {
    "test_engine",
    "test_lane",
    "test_lane_prompts",
    "test_interruption",
    "test_continuations",
    "test_pressure",
    "test_random_schedules",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in AHEAD:
        metafunc.parametrize("runs_ahead", [False, True], indirect=True, ids=["waits", "ahead"])


@pytest.fixture(autouse=True)
def runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    is_wanted = bool(getattr(request, "param", False))
    if is_wanted:
        run_ahead(monkeypatch)
    return is_wanted
