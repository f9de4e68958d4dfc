"""What goes wrong: errors come back as the class they are, retries, broken streams, servers that are none."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx2
import pytest
from fake_memory import FakeMemory

from memkv import MemKV
from memkv.errors import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    ConfigError,
    InternalServerError,
    MemKVError,
    Overloaded,
    UnprocessableDocumentError,
    error_classes,
)
from memkv.sdk import replies
from memkv.wire import Job, Problem, problem_for

CLASSES = [cls for cls in error_classes().values() if not issubclass(cls, APIError) and cls is not MemKVError]


def test_every_class_comes_back(fake: FakeMemory, fake_client: Any) -> None:
    for cls in CLASSES:
        fake.faults["create_collection"] = cls("what happened", hint="what to do")
        with pytest.raises(cls) as caught:
            fake_client.collections.create("c")
        assert type(caught.value) is cls
        assert (caught.value.detail, caught.value.hint) == ("what happened", "what to do")


def test_the_request_id_comes_along(fake: FakeMemory, fake_client: Any) -> None:
    fake.faults["create_collection"] = InternalServerError("fault")
    with pytest.raises(InternalServerError) as caught:
        fake_client.collections.create("c")
    over_http = not isinstance(fake_client, MemKV) or "LocalSender" not in type(fake_client._sender).__name__
    assert bool(caught.value.request_id) == over_http


def test_an_error_midway_ends_the_stream(fake: FakeMemory, fake_client: Any) -> None:
    fake_client.collections.create("c")
    fake.faults["token"] = Overloaded("no blocks")
    stream = fake_client.query_stream("q", collection="c")
    events = iter(stream)
    for _ in range(6):
        next(events)
    with pytest.raises(Overloaded, match="no blocks"):
        next(events)
    assert fake.running == 0


def test_closing_cancels(fake: FakeMemory, fake_client: Any) -> None:
    fake_client.collections.create("c")
    fake.tokens, fake.token_seconds = 10_000, 0.01
    with fake_client.query_stream("q", collection="c") as stream:
        next(iter(stream))
        assert fake.running == 1
    deadline = time.monotonic() + 1
    while fake.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failed_job_raises_what_it_failed_with(
    fake: FakeMemory, fake_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_client.collections.create("c")
    found = fake.get_job

    def failed(job_id: str, **more: Any) -> Job:
        job = found(job_id, **more)
        problem = problem_for(UnprocessableDocumentError("cannot be read", hint="another file"))
        return Job(
            **{**{n: getattr(job, n) for n in job.__struct_fields__}, "status": "failed", "errors": [problem]}
        )

    monkeypatch.setattr(fake, "get_job", failed)
    with pytest.raises(UnprocessableDocumentError, match="cannot be read"):
        fake_client.documents.create("c", text="t")
    assert fake_client.documents.create("c", text="u", wait=False).job.status == "failed"


def test_a_wait_ends(fake: FakeMemory, fake_client: Any) -> None:
    fake_client.collections.create("c")
    fake.job_seconds = 30
    started = time.monotonic()
    accepted = fake_client.documents.create("c", text="t", wait=0.5)
    assert accepted.job.status == "queued"
    assert fake_client.jobs.wait(accepted.job.id, timeout=0.3).status == "queued"
    assert 0.7 < time.monotonic() - started < 5


class Script:
    """Answers of a server, one after another, and what was asked."""

    def __init__(self, *answers: httpx2.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr("memkv.sdk.client.time.sleep", pauses.append)
    return pauses


def client_of(script: Script, **more: Any) -> MemKV:
    http = httpx2.Client(base_url="http://test", transport=httpx2.MockTransport(script))
    return MemKV("http://test", http_client=http, **more)


def overloaded(after: str = "") -> httpx2.Response:
    body = replies.msgspec.json.encode(problem_for(Overloaded("busy")))
    return httpx2.Response(503, content=body, headers={"Retry-After": after} if after else {})


READY = httpx2.Response(200, json={"data": [], "retrieve_ms": 0.0})


class TestRetries:
    def test_until_it_works(self, slept: list[float]) -> None:
        script = Script(overloaded(), httpx2.ConnectError("refused"), READY)
        assert client_of(script).search("q", collection="c").data == []
        assert slept == [0.5, 1.0]

    def test_not_for_ever(self, slept: list[float]) -> None:
        script = Script(overloaded(), overloaded(), overloaded())
        with pytest.raises(Overloaded, match="busy"):
            client_of(script).search("q", collection="c")
        assert len(script.asked) == 3

    def test_as_often_as_said(self, slept: list[float]) -> None:
        with pytest.raises(Overloaded):
            client_of(Script(overloaded()), max_retries=0).search("q", collection="c")

    def test_when_the_server_says(self, slept: list[float]) -> None:
        client_of(Script(overloaded("3"), READY)).search("q", collection="c")
        assert slept == [3.0]

    def test_unless_that_is_far_away(self, slept: list[float]) -> None:
        with pytest.raises(Overloaded):
            client_of(Script(overloaded("3600"))).search("q", collection="c")

    def test_only_what_may_be_sent_twice(self, slept: list[float]) -> None:
        for ask in (
            lambda client: client.collections.create("c"),
            lambda client: client.collections.delete("c"),
            lambda client: client.documents.create("c", text="t"),
            lambda client: client.documents.delete("c", "d"),
        ):
            with pytest.raises(Overloaded):
                ask(client_of(Script(overloaded())))
        for ask in (
            lambda client: client.documents.create("c", text="t", external_id="k"),
            lambda client: client.documents.upsert("c", "k", text="t"),
            lambda client: client.collections.get_or_create("c"),
            lambda client: client.query("q", collection="c"),
        ):
            script = Script(overloaded(), httpx2.Response(404))
            with pytest.raises(MemKVError):
                ask(client_of(script))
            assert len(script.asked) == 2

    def test_not_what_is_wrong(self, slept: list[float]) -> None:
        script = Script(httpx2.Response(400, json={}))
        with pytest.raises(MemKVError):
            client_of(script).search("q", collection="c")
        assert len(script.asked) == 1

    def test_not_ready_is_an_answer(self) -> None:
        script = Script(httpx2.Response(503, json={"status": "not_ready", "checks": {}}))
        assert client_of(script).ready().status == "not_ready"


class TestServersThatAreNone:
    def test_nobody_there(self) -> None:
        with (
            MemKV("http://127.0.0.1:1", max_retries=0) as client,
            pytest.raises(APIConnectionError) as caught,
        ):
            client.info()
        assert "127.0.0.1:1" in caught.value.detail
        assert "memkv serve" in caught.value.hint

    def test_too_slow(self, slept: list[float]) -> None:
        script = Script(httpx2.ReadTimeout("slow"))
        with pytest.raises(APITimeoutError):
            client_of(script, max_retries=0).info()

    @pytest.mark.parametrize(
        "answer",
        [
            httpx2.Response(200, text="<html>a router</html>"),
            httpx2.Response(200, json={"version": 5}),
            httpx2.Response(200, json=[]),
        ],
    )
    def test_something_else(self, answer: httpx2.Response) -> None:
        with pytest.raises(APIError, match="/v1/info"):
            client_of(Script(answer)).info()

    def test_a_proxy_in_front(self) -> None:
        with pytest.raises(MemKVError, match="502"):
            client_of(Script(httpx2.Response(502, text="Bad Gateway")), max_retries=0).info()

    def test_an_error_of_a_newer_server(self) -> None:
        newer = Problem(type="x", title="x", status=409, detail="new", code="of_tomorrow")
        body = replies.msgspec.json.encode(newer)
        with pytest.raises(error_classes()["conflict"], match="new"):
            client_of(Script(httpx2.Response(409, content=body))).info()


def sse(*events: dict[str, Any] | bytes) -> httpx2.Response:
    frames = [
        event if isinstance(event, bytes) else b"event: x\ndata: " + json.dumps(event).encode() + b"\n\n"
        for event in events
    ]
    return httpx2.Response(200, content=b"".join(frames), headers={"Content-Type": "text/event-stream"})


CREATED = {"type": "query.created", "id": "q"}


class TestStreamsThatBreak:
    @pytest.mark.parametrize(
        "answer",
        [
            sse(CREATED),
            sse(CREATED, b"event: x\ndata: {\n\n"),
            httpx2.Response(200, text="no events", headers={"Content-Type": "text/plain"}),
        ],
    )
    def test_are_connection_errors(self, answer: httpx2.Response) -> None:
        with pytest.raises(APIConnectionError):
            client_of(Script(answer)).query_stream("q", collection="c").finish()

    def test_unknown_events_and_pings_are_passed_over(self) -> None:
        answer = sse(b": ping\n\n", CREATED, {"type": "of.tomorrow", "x": 1}, b": ping\n\n")
        stream = client_of(Script(answer)).query_stream("q", collection="c")
        events = iter(stream)
        assert next(events).id == "q"
        with pytest.raises(APIConnectionError, match="ended before"):
            next(events)

    def test_a_cut_connection(self, fake: FakeMemory) -> None:
        listener = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer() -> None:
                connection, _ = server.accept()
                connection.recv(65536)
                head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n")
                connection.close()
                listener.set()

            threading.Thread(target=answer, daemon=True).start()
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            with MemKV(url, max_retries=0) as client, pytest.raises(APIConnectionError):
                client.query_stream("q", collection="c").finish()
        assert listener.wait(5)


class TestSettings:
    @pytest.mark.parametrize("url", ["nowhere", "ftp://x", "http://", "http://[::1", "http://x:port"])
    def test_urls_that_are_none(self, url: str) -> None:
        with pytest.raises(ConfigError):
            MemKV(url)

    def test_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[httpx2.Request] = []
        monkeypatch.setenv("MEMKV_URL", "http://elsewhere:9/prefix/")
        monkeypatch.setenv("MEMKV_API_KEY", "mkv_secret")
        monkeypatch.setenv("MEMKV_TIMEOUT", "7")
        real = httpx2.Client

        def watched(**arguments: Any) -> httpx2.Client:
            assert arguments["timeout"].read == 7
            return real(**arguments, transport=httpx2.MockTransport(lambda r: asked.append(r) or READY))

        monkeypatch.setattr("memkv.sdk.client.httpx2.Client", watched)
        MemKV().search("q", collection="c")
        assert str(asked[0].url) == "http://elsewhere:9/prefix/v1/search"
        assert asked[0].headers["authorization"] == "Bearer mkv_secret"

    @pytest.mark.parametrize("timeout", ["soon", "-1", "0", "nan", "inf"])
    def test_timeouts_that_are_none(self, monkeypatch: pytest.MonkeyPatch, timeout: str) -> None:
        monkeypatch.setenv("MEMKV_TIMEOUT", timeout)
        with pytest.raises(ConfigError):
            MemKV()

    def test_a_key_that_no_header_carries(self) -> None:
        with pytest.raises(ConfigError) as caught:
            MemKV(api_key="mkv_secret\n")
        assert "ends the line" in caught.value.hint
        assert "secret" not in f"{caught.value.detail} {caught.value.hint}"
