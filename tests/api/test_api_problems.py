"""Errors: each class keeps its code and status on the way out, and nothing of an unexpected one gets out."""

from __future__ import annotations

import logging
import re

import httpx2
import msgspec
import pytest
from fake_memory import FakeMemory

from memkv.errors import (
    APIError,
    DatabaseUnavailable,
    EngineClosed,
    MemKVError,
    Overloaded,
    PoolExhausted,
    error_classes,
)
from memkv.wire import Problem

LEAKS = re.compile(r"Traceback|File \"|\.py|site-packages|SELECT|INSERT|secret text", re.IGNORECASE)
SERVER_SIDE = [
    cls for cls in error_classes().values() if not issubclass(cls, APIError) and cls is not MemKVError
]


@pytest.mark.parametrize("cls", SERVER_SIDE, ids=lambda cls: cls.__name__)
def test_every_class_keeps_code_status_and_hint(
    fake: FakeMemory, fake_http: httpx2.Client, cls: type[MemKVError]
) -> None:
    fake.faults["info"] = cls("what happened", hint="what to do")
    response = fake_http.get("/v1/info")
    found = msgspec.json.decode(response.content, type=Problem)
    assert response.headers["content-type"] == "application/problem+json"
    assert (response.status_code, found.status, found.code) == (cls.status, cls.status, cls.code)
    assert (found.detail, found.hint) == ("what happened", "what to do")
    assert found.instance == "/v1/info"
    assert found.type == f"urn:memkv:problem:{cls.code}"


@pytest.mark.parametrize("cls", [Overloaded, PoolExhausted, EngineClosed, DatabaseUnavailable])
def test_what_passes_says_when_to_come_back(
    fake: FakeMemory, fake_http: httpx2.Client, cls: type[MemKVError]
) -> None:
    fake.faults["info"] = cls("busy")
    assert int(fake_http.get("/v1/info").headers["retry-after"]) >= 1


@pytest.mark.parametrize("where", ["info", "query_stream", "token"])
def test_the_unexpected_is_a_500_without_internals(
    fake: FakeMemory, fake_http: httpx2.Client, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    fake_http.put("/v1/collections/c", json={})
    fake.faults[where] = ValueError("secret text of a document")
    query = {"query": "q", "collection": "c"}
    with caplog.at_level(logging.INFO):
        response = fake_http.get("/v1/info") if where == "info" else fake_http.post("/v1/query", json=query)
    assert response.status_code == 500
    assert response.json()["code"] == "internal_error"
    assert not LEAKS.search(response.text)
    assert "secret text" not in caplog.text


@pytest.mark.parametrize(
    "error", [RecursionError("deep"), OverflowError("2**63"), UnicodeError("half a character")]
)
def test_values_that_nothing_can_hold_are_a_400(
    fake: FakeMemory, fake_http: httpx2.Client, error: Exception
) -> None:
    fake.faults["info"] = error
    assert fake_http.get("/v1/info").status_code == 400


def test_not_ready_is_a_503_with_reasons(fake: FakeMemory, fake_http: httpx2.Client) -> None:
    fake.is_ready = False
    response = fake_http.get("/readyz")
    assert response.status_code == 503
    assert response.json()["checks"]["store"]["ok"] is False
    assert fake_http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"query": "", "collection": "c"}', "query"),
        (b'{"query": "a\\u0000", "collection": "c"}', "NUL"),
        (b'{"query": "\xff", "collection": "c"}', "UTF-8"),
        (b'{"collection": "c", "query": "a\\ud800"}', "surrogate"),
        (b'{"collection": "c", "query":', "ends too early"),
        (b"", "empty"),
    ],
)
def test_a_malformed_request_is_told_what_and_where_to_look(
    fake_http: httpx2.Client, body: bytes, told: str
) -> None:
    response = fake_http.post("/v1/query", content=body, headers={"content-type": "application/json"})
    problem = msgspec.json.decode(response.content, type=Problem)
    assert problem.status == 400
    assert told in problem.detail
    assert "/docs" in problem.hint
