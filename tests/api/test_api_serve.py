"""Where a server listens, how it stops, and what its log shows."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_memory import FakeMemory
from live_server import live_server
from memkv.api.drain import Drain
from memkv.api.serve import listen

from memkv.config import Config, ServerConfig
from memkv.errors import ConfigError


class TestListen:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.8.8", "::1", "[::1]"])
    def test_loopback(self, host: str) -> None:
        try:
            sock = listen(ServerConfig(host=host, port=0))
        except ConfigError as error:
            if ":" in host and "cannot listen" in error.detail:
                pytest.skip("no IPv6 here")
            raise
        sock.close()

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
    def test_other_addresses_are_refused(self, host: str) -> None:
        with pytest.raises(ConfigError, match="other machines") as caught:
            listen(ServerConfig(host=host, port=0))
        assert "--insecure" in caught.value.hint
        assert "127.0.0.1" in caught.value.hint

    def test_unless_told_otherwise(self) -> None:
        listen(ServerConfig(host="0.0.0.0", port=0, insecure=True)).close()

    def test_a_body_does_not_wait_for_its_head_to_be_acknowledged(self, fake_http: httpx2.Client) -> None:
        """On a connection that is used again, the client acknowledges 40 ms late."""

        def seconds() -> float:
            started = time.perf_counter()
            fake_http.get("/healthz")
            return time.perf_counter() - started

        assert min([seconds() for _ in range(40)][20:]) < 0.03  # the first ones are acknowledged at once

    def test_a_taken_port(self) -> None:
        with listen(ServerConfig(port=0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is taken") as caught:
                listen(ServerConfig(port=port))
        assert f"--port {port + 1}" in caught.value.hint

    @pytest.mark.parametrize("host", ["", "no such host.invalid", "a" * 300, "\0"])
    def test_no_address(self, host: str) -> None:
        with pytest.raises(ConfigError) as caught:
            listen(ServerConfig(host=host, port=0))
        assert caught.value.hint


class TestDrain:
    @pytest.fixture
    def fake(self) -> FakeMemory:
        fake = FakeMemory(token_seconds=0.05, tokens=20)
        return fake

    def test_running_requests_finish_and_new_ones_are_refused(self, fake: FakeMemory) -> None:
        with (
            live_server(fake, Config(server=ServerConfig(port=0))) as server,
            httpx2.Client(base_url=server.url) as client,
        ):
            client.put("/v1/collections/c", json={})
            body = {"query": "q", "collection": "c", "stream": True}
            with client.stream("POST", "/v1/query", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.drain.begin()
                refused = client.get("/v1/info")
                assert (refused.status_code, refused.json()["code"]) == (503, "engine_closed")
                assert int(refused.headers["retry-after"]) >= 1
                assert client.get("/readyz").status_code == 503
                assert client.get("/healthz").status_code == 200
                assert any("query.completed" in line for line in lines)
        assert fake.running == 0

    def test_who_stops_the_server_stops_it_whatever_was_to_be_restored_next(self) -> None:
        wanted: Any = object()
        drain = Drain(serves_again=True)
        drain.begin()
        drain.restore(wanted)
        assert drain.restoration is None
        drain = Drain(serves_again=True)
        drain.restore(wanted)
        assert (drain.restoration, drain.draining) == (wanted, True)

    def test_what_outlasts_the_deadline_is_told(self, fake: FakeMemory) -> None:
        fake.tokens = 10_000
        answers: list[httpx2.Response] = []
        with live_server(fake, Config(server=ServerConfig(port=0))) as server:
            httpx2.put(f"{server.url}/v1/collections/c", json={})
            body = {"query": "q", "collection": "c"}
            asking = threading.Thread(
                target=lambda: answers.append(httpx2.post(f"{server.url}/v1/query", json=body, timeout=20))
            )
            asking.start()
            with httpx2.stream("POST", f"{server.url}/v1/query", json={**body, "stream": True}) as stream:
                while fake.running < 2:
                    time.sleep(0.01)
                server.drain.cut()
                last = list(stream.iter_lines())[-3:]
            asking.join()
        assert last[0] == "event: error"
        assert json.loads(last[1].removeprefix("data: "))["problem"]["code"] == "engine_closed"
        assert (answers[0].status_code, answers[0].json()["code"]) == (503, "engine_closed")
        assert fake.running == 0


SERVER = """
import sys
sys.path.insert(0, {tests!r})
from fake_memory import FakeMemory
from memkv.api import serve
from memkv.config import Config, LogConfig, ServerConfig
memory = FakeMemory(token_seconds=0.05, tokens=int(sys.argv[1]))
config = Config(server=ServerConfig(port=0, drain_seconds=float(sys.argv[2])), log=LogConfig(format="json"))
serve(memory, config, on_start=lambda url: print(url, flush=True))
print("ended", memory.running, flush=True)
"""


class Process:
    """`serve` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        script = SERVER.format(tests=str(Path(__file__).parent.parent))
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def stop(self, *signals: signal.Signals) -> float:
        started = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.2)
        self.process.wait(20)
        return time.monotonic() - started


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    """Tokens of an answer, and seconds of the drain, come from the test's `params` marker."""
    server = Process(*request.param)
    yield server
    server.process.kill()
    server.process.communicate()


class TestProcess:
    @pytest.mark.parametrize("process", [("20", "10")], indirect=True)
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_lets_streams_finish(self, process: Process, number: signal.Signals) -> None:
        with httpx2.Client(base_url=process.url, timeout=20) as client:
            client.put("/v1/collections/c", json={})
            body = {"query": "the secret question", "collection": "c", "stream": True}
            with client.stream("POST", "/v1/query", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.process.send_signal(number)
                time.sleep(0.1)
                assert client.get("/v1/info").status_code == 503
                assert any("query.completed" in line for line in lines)
        out, err = process.process.communicate(timeout=10)
        assert process.process.returncode == 0
        assert out == "ended 0\n"
        self.check_log(err)

    @staticmethod
    def check_log(err: str) -> None:
        events = [json.loads(line) for line in err.splitlines()]
        requests = [event for event in events if event["event"] == "request"]
        assert {"PUT", "POST", "GET"} == {event["method"] for event in requests}
        for event in requests:
            assert {"request_id", "path", "status", "ms", "client", "level", "timestamp"} <= event.keys()
        assert "secret" not in err
        assert "/v1/collections/{collection}" in {event["path"] for event in requests}

    @pytest.mark.parametrize("process", [("100000", "1")], indirect=True)
    def test_the_drain_has_an_end(self, process: Process) -> None:
        with httpx2.Client(base_url=process.url, timeout=20) as client:
            client.put("/v1/collections/c", json={})
            body = {"query": "q", "collection": "c", "stream": True}
            with client.stream("POST", "/v1/query", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                started = time.monotonic()
                process.process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line.startswith("event: ")][-1] == "event: error"
        out, _ = process.process.communicate(timeout=10)
        assert 0.8 < time.monotonic() - started < 5
        assert out == "ended 0\n"
        assert process.process.returncode == 0

    @pytest.mark.parametrize("process", [("100000", "600")], indirect=True)
    def test_a_second_signal_ends_at_once(self, process: Process) -> None:
        with httpx2.Client(base_url=process.url, timeout=20) as client:
            client.put("/v1/collections/c", json={})
            body = {"query": "q", "collection": "c", "stream": True}
            with client.stream("POST", "/v1/query", json=body) as stream:
                next(stream.iter_lines())
                assert process.stop(signal.SIGTERM, signal.SIGTERM) < 5

    @pytest.mark.parametrize("process", [("5", "600")], indirect=True)
    def test_an_idle_server_stops_at_once(self, process: Process) -> None:
        with httpx2.Client(base_url=process.url) as client:
            client.get("/healthz")  # its connection stays open
            assert process.stop(signal.SIGTERM) < 3


class TestRequestId:
    @pytest.mark.parametrize("given", ["abc-123", "a" * 128, "trace:1.2_3"])
    def test_is_kept(self, fake_http: httpx2.Client, given: str) -> None:
        response = fake_http.get("/v1/none", headers={"X-Request-ID": given})
        assert response.headers["x-request-id"] == response.json()["request_id"] == given

    @pytest.mark.parametrize("given", ["", "a" * 129, "a b", "<script>", "é", "-a"])
    def test_is_made_where_it_is_none(self, fake_http: httpx2.Client, given: str) -> None:
        made = {
            fake_http.get("/healthz", headers={"X-Request-ID": given.encode()}).headers["x-request-id"]
            for _ in range(2)
        }
        assert len(made) == 2
        assert all(len(one) == 32 and one.isalnum() for one in made)


def test_a_dripping_head_is_cut(fake_http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkv.api.protocol.HEADER_SECONDS", 0.3)
    port = fake_http.base_url.port
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert sock.recv(100) == b""


def test_a_dripping_body_is_cut(fake_http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkv.api.edge.BODY_SECONDS", 0.3)
    port = fake_http.base_url.port
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        head = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: 9\r\n\r\n{")
        assert sock.recv(4096).startswith(b"HTTP/1.1 408")


class TestWhoMayAsk:
    """A web page in the user's browser must not reach a server that nothing but loopback protects."""

    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:8000", "127.9.9.9:1"]
    )
    def test_this_machine(self, fake_http: httpx2.Client, host: str) -> None:
        assert fake_http.get("/v1/info", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1"]
    )
    def test_a_foreign_name(self, fake_http: httpx2.Client, host: str) -> None:
        refused = fake_http.get("/v1/info", headers={"Host": host})
        assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
        assert "server.insecure" in refused.json()["hint"]
        assert fake_http.get("/healthz", headers={"Host": host}).status_code == 200

    def test_a_foreign_page(self, fake_http: httpx2.Client) -> None:
        fake_http.put("/v1/collections/c", json={})
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
            headers = {"Sec-Fetch-Site": site}
            files = [("file", ("a.txt", b"text"))]
            sent = fake_http.post("/v1/collections/c/documents", files=files, headers=headers)
            assert sent.status_code == status

    def test_unless_told_otherwise(self) -> None:
        config = Config(server=ServerConfig(port=0, insecure=True))
        with live_server(FakeMemory(), config) as server:
            response = httpx2.get(f"{server.url}/v1/info", headers={"Host": "memkv.example"})
        assert response.status_code == 200
