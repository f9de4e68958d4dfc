"""`/metrics`: every number of the store, in a form that Prometheus' own parser reads."""

from __future__ import annotations

import httpx2
import pytest
from fake_memory import FakeMemory
from prometheus_client.parser import text_string_to_metric_families
from test_api_routes import TEXT, reply

from memkv.errors import DatabaseUnavailable
from memkv.wire import Accepted, StoreStats


def values(http: httpx2.Client) -> dict[tuple[str, str], float]:
    """(name, label value) -> value."""
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            assert sample.name.startswith("memkv_")
            key = sample.name, next(iter(sample.labels.values()), "")
            assert key not in found
            found[key] = sample.value
    return found


def test_the_numbers_are_those_of_the_store(http: httpx2.Client, collection: str) -> None:
    before = values(http)
    assert http.put(f"/v1/collections/{collection}", json={}).status_code == 201
    sent = {"text": f"{TEXT} {collection}", "external_id": "port"}
    done = http.post(f"/v1/collections/{collection}/documents", json=sent, params={"wait": 60})
    assert reply(done, 200, Accepted).job.status == "succeeded"
    asked = {
        "collection": collection,
        "query": "Who was its keeper?",
        "policy": "map",
        "generation": {"max_tokens": 2},
    }
    assert http.post("/v1/query", json=asked).status_code == 200
    stats = reply(http.get("/v1/store/stats"), 200, StoreStats)
    now = values(http)
    for name in ("collections", "chunks", "tokens", "kv_files", "kv_bytes", "generation"):
        assert now[f"memkv_{name}", ""] == getattr(stats, name)
    assert sum(value for (name, _), value in now.items() if name == "memkv_documents") == stats.documents
    assert now["memkv_collection_kv_bytes", collection] > 0
    assert now["memkv_jobs", "succeeded"] > before["memkv_jobs", "succeeded"]
    assert now["memkv_kv_published_total", ""] > before["memkv_kv_published_total", ""]
    assert now["memkv_kv_published_bytes_total", ""] == stats.counters["published_bytes"]
    assert now["memkv_engine_generated_tokens_total", ""] > before.get(
        ("memkv_engine_generated_tokens_total", ""), 0
    )
    assert now["memkv_retrievals_total", ""] == before["memkv_retrievals_total", ""] + 1
    assert now["memkv_retrieve_seconds_total", ""] > before["memkv_retrieve_seconds_total", ""]
    for stage in ("queue", "prefill", "decode"):
        name = f"memkv_engine_{stage}_seconds_total"
        assert now[name, ""] > before.get((name, ""), 0)
    assert {state: now["memkv_pool_blocks", state] for state in stats.pool} == stats.pool
    assert now["memkv_disk_free_bytes", ""] > 0
    assert now["memkv_stale_collections", ""] == len(stats.stale)
    for name in ("snapshots", "snapshot_bytes", "archives", "archive_bytes"):
        assert now[f"memkv_{name}", ""] >= 0
    assert now["memkv_recovery", "epoch"] >= 1
    shown = {name for name, _ in now}
    for counter in stats.counters:
        known = {f"memkv_kv_{counter}_total", f"memkv_{counter}", "memkv_kv_damaged_total"}
        assert shown & known, f"{counter} is no metric"


def test_no_counter_falls(http: httpx2.Client) -> None:
    before, now = values(http), values(http)
    for key, value in before.items():
        if key[0].endswith("_total"):
            assert now[key] >= value


@pytest.mark.parametrize("fault", [DatabaseUnavailable("the database is locked", hint="wait")])
def test_a_database_that_is_away_is_a_problem(
    fake: FakeMemory, fake_http: httpx2.Client, fault: Exception
) -> None:
    fake.faults["metrics"] = fault
    assert fake_http.get("/metrics").status_code == 503
