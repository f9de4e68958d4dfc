"""Answers as they are made: order, pings, errors midway, and what is freed when the client leaves."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from fake_memory import FakeMemory
from live_server import LiveServer
from memkv.api import event_stream

from memkv.errors import Overloaded

if TYPE_CHECKING:
    from memkv.memory import Memory

QUERY = {"query": "q", "collection": "c", "generation": {"max_tokens": 1000}}


@pytest.fixture(autouse=True)
def _collection(fake_http: httpx2.Client) -> None:
    fake_http.put("/v1/collections/c", json={})


def eventually(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def open_stream(server: LiveServer, body: dict[str, Any] | None = None) -> socket.socket:
    """A socket on which a streamed query has been sent and nothing been read."""
    content = json.dumps(body or {**QUERY, "stream": True}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = "POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return sock


def frames(text: str) -> list[dict[str, str]]:
    return [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in text.strip().split("\n\n")]


def test_events_come_as_they_are_made(fake: FakeMemory, fake_http: httpx2.Client) -> None:
    fake.token_seconds, fake.tokens = 0.1, 4
    arrivals = []
    with fake_http.stream("POST", "/v1/query", json={**QUERY, "stream": True}) as response:
        arrivals = [time.monotonic() for line in response.iter_lines() if line.startswith("data")]
    assert len(arrivals) == 2 + 4 + 1
    assert arrivals[-1] - arrivals[1] > 0.25, "everything came at once"


def test_silence_is_filled_with_pings(
    fake: FakeMemory, fake_http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.05)
    fake.token_seconds, fake.tokens = 0.3, 2
    text = fake_http.post("/v1/query", json={**QUERY, "stream": True}).text
    assert text.count(": ping\n\n") >= 4
    events = frames(text.replace(": ping\n\n", ""))
    assert [frame["event"] for frame in events][-1] == "query.completed"
    assert [frame["id"] for frame in events] == ["1", "2", "3", "4", "5"]


def test_an_error_midway_is_an_event(fake: FakeMemory, fake_http: httpx2.Client) -> None:
    fake.faults["token"] = Overloaded("no blocks", hint="later")
    response = fake_http.post("/v1/query", json={**QUERY, "stream": True})
    assert response.status_code == 200
    last = frames(response.text)[-1]
    problem = json.loads(last["data"])["problem"]
    assert last["event"] == "error"
    assert (problem["code"], problem["status"], problem["hint"]) == ("overloaded", 503, "later")
    assert problem["request_id"] == response.headers["x-request-id"]


def test_an_error_at_the_start_has_its_own_status(fake: FakeMemory, fake_http: httpx2.Client) -> None:
    fake.faults["query_stream"] = Overloaded("no blocks")
    assert fake_http.post("/v1/query", json={**QUERY, "stream": True}).status_code == 503


@pytest.mark.parametrize("how", ["in the middle", "before the first token", "as one answer"])
def test_a_client_that_leaves_frees_everything(fake: FakeMemory, server: LiveServer, how: str) -> None:
    fake.token_seconds, fake.tokens = (30.0 if how == "before the first token" else 0.02), 1000
    sock = open_stream(server, QUERY if how == "as one answer" else None)
    if how == "in the middle":
        received = b""
        while b"output.delta" not in received:
            received += sock.recv(4096)
    eventually(lambda: fake.running == 1)
    sock.close()
    eventually(lambda: fake.running == 0)


def test_a_client_that_leaves_during_retrieval(fake: FakeMemory, server: LiveServer) -> None:
    fake.tokens, fake.token_seconds = 1000, 0.02
    fake.gate.clear()
    sock = open_stream(server)
    eventually(lambda: "query_stream" in fake.calls)
    sock.close()
    time.sleep(0.1)
    fake.gate.set()
    eventually(lambda: fake.calls.count("query_stream") == 1 and fake.running == 0)


def test_many_streams_cut_anywhere(fake: FakeMemory, fake_http: httpx2.Client, server: LiveServer) -> None:
    fake.tokens, fake.token_seconds = 200, 0.001
    chance = random.Random(5)

    def cut_some() -> None:
        for _ in range(25):
            with open_stream(server) as sock:
                left = chance.randrange(6000)
                while left > 0 and (read := sock.recv(min(left, 4096))):
                    left -= len(read)

    threads = [threading.Thread(target=cut_some) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: fake.running == 0)
    fake.token_seconds = 0.0
    for _ in range(8):  # twice the threads: none is lost
        assert fake_http.post("/v1/query", json={**QUERY, "generation": {"max_tokens": 1}}).status_code == 200


def test_a_client_that_does_not_read_holds_no_block(fake: FakeMemory, server: LiveServer) -> None:
    fake.tokens = 20_000
    body = {**QUERY, "stream": True, "generation": {"max_tokens": 20_000}}
    with open_stream(server, body):
        eventually(lambda: "query_stream" in fake.calls, 5)
        eventually(lambda: fake.running == 0, 10)


def test_the_real_engine_frees_its_blocks(http: httpx2.Client, memory: Memory, collection: str) -> None:
    http.put(f"/v1/collections/{collection}", json={})
    text = "The lighthouse of Porto Velho was built in 1912. Its keeper was Amalia Reis."
    http.post(f"/v1/collections/{collection}/documents", json={"text": text}, params={"wait": 60})
    body = {
        "query": "Tell a very long story of the lighthouse.",
        "collection": collection,
        "generation": {"max_tokens": 1000, "temperature": 2.0, "seed": 1},
        "stream": True,
    }

    def held() -> int:
        pool = memory.store_stats().pool
        return pool["pinned"] + pool["private"]

    for tokens in (0, 3):
        with http.stream("POST", "/v1/query", json=body) as response:
            lines = (line for line in response.iter_lines() if line.startswith("event: "))
            assert next(lines) == "event: query.created"
            for _ in range(tokens and 1 + tokens):
                next(lines)
            if tokens:
                assert held() > 0
        eventually(lambda: held() == 0, 1.0)
