"""Memory calls in threads: the event loop stays free, a full server refuses instead of queueing for ever."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from fake_memory import FakeMemory
from live_server import LiveServer

from memkv.errors import DatabaseUnavailable


def get_many(server: LiveServer, path: str, count: int) -> list[httpx2.Response]:
    with (
        httpx2.Client(base_url=server.url, timeout=20) as client,
        ThreadPoolExecutor(count) as pool,
    ):
        return list(pool.map(lambda _: client.get(path), range(count)))


def test_a_full_server_refuses_in_time(fake: FakeMemory, server: LiveServer) -> None:
    fake.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(get_many, server, "/v1/info", 4)  # as many as there are threads
        while fake.calls.count("info") < 4:
            time.sleep(0.01)
        started = time.monotonic()
        refused = httpx2.get(f"{server.url}/v1/info")
        waited = time.monotonic() - started
        alive = httpx2.get(f"{server.url}/healthz", timeout=1)
        fake.gate.set()
        assert [response.status_code for response in held.result()] == [200] * 4
    assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    assert 0.25 < waited < 2
    assert alive.status_code == 200
    assert httpx2.get(f"{server.url}/v1/info").status_code == 200


def test_probes_answer_while_calls_hang(fake: FakeMemory, server: LiveServer) -> None:
    fake.token_seconds, fake.tokens = 0.2, 10
    httpx2.put(f"{server.url}/v1/collections/c", json={})
    body = {"query": "q", "collection": "c"}
    with ThreadPoolExecutor(6) as pool:
        queries = [
            pool.submit(httpx2.post, f"{server.url}/v1/query", json=body, timeout=20) for _ in range(6)
        ]
        while fake.running < 3:
            time.sleep(0.01)
        started = time.monotonic()
        assert httpx2.get(f"{server.url}/healthz").status_code == 200
        assert httpx2.get(f"{server.url}/readyz").status_code == 200
        # Generations may hold three of the four threads: the last one is for everything else.
        assert httpx2.get(f"{server.url}/v1/info").status_code == 200
        assert time.monotonic() - started < 1.5
        statuses = sorted(query.result().status_code for query in queries)
    assert statuses == [200, 200, 200, 503, 503, 503]


def test_waiting_for_a_job_holds_no_thread(fake: FakeMemory, server: LiveServer) -> None:
    fake.job_seconds = 0.6
    httpx2.put(f"{server.url}/v1/collections/c", json={})

    def ingest(number: int) -> httpx2.Response:
        path = f"{server.url}/v1/collections/c/documents?wait=20"
        return httpx2.post(path, json={"text": f"text {number}"}, timeout=20)

    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(ingest, range(12)))  # three times the threads, each past queue_seconds
    assert [response.status_code for response in responses] == [200] * 12


def test_a_bad_moment_does_not_undo_an_ingest(fake: FakeMemory, fake_http: httpx2.Client) -> None:
    fake.job_seconds = 0.6
    fake_http.put("/v1/collections/c", json={})
    path, body = "/v1/collections/c/documents", {"text": "t"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fake_http.post, path, json=body, params={"wait": 10})
        while fake.calls.count("get_job") < 3:  # kept, and looked at
            time.sleep(0.01)
        fake.faults["get_job"] = DatabaseUnavailable("locked")
        time.sleep(0.2)
        fake.faults.clear()
        response = waiting.result()
    assert response.status_code == 200
    assert response.json()["job"]["status"] == "succeeded"


def test_a_wait_that_is_too_short_is_a_202(fake: FakeMemory, fake_http: httpx2.Client) -> None:
    fake.job_seconds = 5
    fake_http.put("/v1/collections/c", json={})
    response = fake_http.post("/v1/collections/c/documents", json={"text": "t"}, headers={"Prefer": "wait=0"})
    assert response.status_code == 202
    started = time.monotonic()
    waited = fake_http.post(
        "/v1/collections/c/documents", json={"text": "u"}, params={"wait": 0.3}, headers={"Prefer": "wait=20"}
    )
    assert waited.status_code == 202
    assert waited.headers["location"].startswith("/v1/jobs/job_")
    assert 0.25 < time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("header", "waits"),
    [
        ("wait=20", True),
        ("respond-async, wait=20", True),
        ("return=minimal; wait=20", True),
        ("nowait=20", False),
        ("wait=", False),
        ("wait=-1", False),
        ("wait=9999999999999999999999", False),
    ],
)
def test_the_prefer_header(fake: FakeMemory, fake_http: httpx2.Client, header: str, waits: bool) -> None:
    fake.job_seconds = 0.2
    fake_http.put("/v1/collections/c", json={})
    response = fake_http.post("/v1/collections/c/documents", json={"text": "t"}, headers={"Prefer": header})
    assert response.status_code == (200 if waits else 202)
