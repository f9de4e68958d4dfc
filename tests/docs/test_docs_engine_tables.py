"""The tables of README's engine block show what a result holds, whether it is an older one or not."""

from __future__ import annotations

import json
from pathlib import Path

import engine_tables
import pytest

SPANS = [("read", 0.0, 8.0), ("verified", 2.0, 9.0), ("fresh pass", 9.0, 10.0)]


def test_what_newer_results_hold_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = json.loads((engine_tables.RESULTS / "engine-h200.json").read_text())
    events = [dict(zip(("what", "start_ms", "end_ms"), span, strict=True)) for span in SPANS]
    found["timeline"] = [
        {"context": 32_768, "policy": "select:0.1", "tier": "disk", "ms": 10.0, "events": events}
    ]
    found["disk_verify_share"] = 0.0321
    found["decode"][0]["peers_ms"]["continuous_batching"] = 43.21
    found["decode"][2]["peers_failed"] = {"continuous_batching": "OutOfMemoryError: too much"}
    (tmp_path / "engine-h200.json").write_text(json.dumps(found))
    monkeypatch.setattr(engine_tables, "RESULTS", tmp_path)
    shown = engine_tables.engine()
    assert "3.2% of the time of the loads" in shown
    assert "ended 1 ms behind the last of them" in shown
    assert "```text\nselect:0.1 over 32,768 tokens from disk: 10.0 ms\nread " in shown
    assert "| transformers | its continuous batching |" in shown and "| 43.2 ms |" in shown
    assert "its continuous batching, 64 at once: OutOfMemoryError: too much" in shown


def test_a_replayed_load_is_shown_where_one_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = json.loads((engine_tables.RESULTS / "engine-h200.json").read_text())
    found["load"] = [{**found["load"][0], "policy": "map", "good_share": 0.5, "ttft_p99_ms": 98.76}]
    monkeypatch.setattr(engine_tables, "RESULTS", tmp_path)
    (tmp_path / "engine-h200.json").write_text(json.dumps(found))
    shown = engine_tables.engine()
    assert "| `map` | 50% |" in shown and "| 98.8 ms |" in shown
    del found["load"]
    (tmp_path / "engine-h200.json").write_text(json.dumps(found))
    assert "Good is a request" not in engine_tables.engine()
