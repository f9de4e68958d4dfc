"""Requests made from the OpenAPI document, valid and not: whatever comes, no fault of the server answers."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
import schemathesis
from guarded_server import Guarded, guarded
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from test_api_openapi import ROUTES, document

__all__ = ["guarded"]

EXAMPLES = 12  # of each operation and mode

CASES = [
    pytest.param(path, method, mode, id=f"{method} {path} {mode.value}")
    for path, methods in ROUTES.items()
    for method in sorted(methods)
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    # A route that takes nothing cannot be asked wrongly.
    if mode is GenerationMode.POSITIVE
    or method != "get"
    or document()["paths"][path][method].get("parameters")
]


@pytest.fixture(scope="session")
def schema(http: httpx2.Client) -> Any:
    assert http.put("/v1/collections/fuzz", json={}).status_code in (200, 201)
    sent = http.post("/v1/collections/fuzz/documents", json={"text": "A text."}, params={"wait": 60})
    assert sent.status_code == 200
    return schemathesis.openapi.from_dict(document())


def check(response: httpx2.Response) -> None:
    """What holds for every answer."""
    assert response.status_code < 500, f"{response.request.method} {response.request.url}: {response.text}"
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/problem+json", response.text
        assert {"type", "title", "status", "detail", "code", "request_id"} <= response.json().keys()


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_requests_of_the_document(
    http: httpx2.Client, guarded: Guarded, schema: Any, path: str, method: str, mode: GenerationMode
) -> None:
    operation = schema[path][method]
    # The other server has no key, and the first one that were made would close it to the other tests.
    asks_for_keys = path.startswith("/v1/keys")
    base_url = guarded.url if asks_for_keys else str(http.base_url)
    headers = {"Authorization": f"Bearer {guarded.admin.secret}"} if asks_for_keys else {}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def ask(case: Any, known: bool) -> None:
        tame(case, known)
        response = case.call(base_url=base_url, headers=headers)
        check_case(case, response)

    ask()


def tame(case: Any, known: bool) -> None:
    """Leads half of the requests to a collection that exists, and keeps answers, checks and waits short."""
    if known and "collection" in (case.path_parameters or {}) and case.method != "DELETE":
        case.path_parameters["collection"] = "fuzz"
    if isinstance(case.body, dict):
        if known and "collection" in case.body:
            case.body["collection"] = "fuzz"
        if isinstance(case.body.get("deep"), int):
            case.body["deep"] %= 2
        generation = case.body.get("generation")
        if isinstance(generation, dict) and isinstance(generation.get("max_tokens"), int | None):
            generation["max_tokens"] = 1
    wait = (case.query or {}).get("wait")
    if isinstance(wait, int | float) and wait > 0.1:
        case.query["wait"] = 0.1


def check_case(case: Any, response: Any) -> None:
    assert response.status_code < 500, f"{case.as_curl_command()}: {response.text}"
    checks = [
        CHECKS.get_one(name)
        for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    ]
    case.validate_response(response, checks=checks)


@settings(
    max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "X"]),
    path=st.sampled_from(sorted(ROUTES)).flatmap(
        lambda path: st.binary(max_size=20).map(lambda junk: path.split("{")[0] + quoted(junk))
    ),
    query=st.binary(max_size=30),
    kind=st.sampled_from(
        ["application/json", "multipart/form-data; boundary=b", "text/plain", "", "é", ";;="]
    ),
    prefer=st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20),
    body=st.binary(max_size=60),
)
def test_bytes_of_any_kind(
    http: httpx2.Client, method: str, path: str, query: bytes, kind: str, prefer: str, body: bytes
) -> None:
    headers = {"Content-Type": kind.encode("latin-1"), "Prefer": prefer.strip().encode("latin-1")}
    url = httpx2.URL(http.base_url, raw_path=f"{path}?{quoted(query)}".encode())
    request = httpx2.Request(method, url, headers=headers, content=body)
    response = http.send(request)
    if method == "HEAD":
        assert response.status_code < 500
    else:
        check(response)


def quoted(junk: bytes) -> str:
    return "".join(chr(byte) if chr(byte).isalnum() and byte < 128 else f"%{byte:02X}" for byte in junk)
