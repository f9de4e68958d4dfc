"""The OpenAPI document says what the routes do, and the page that shows it asks no other host."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import httpx2
import pytest
from memkv.api.controllers import CONTROLLERS
from memkv.api.docs import openapi_document

ROUTES = {
    "/healthz": {"get"},
    "/readyz": {"get"},
    "/metrics": {"get"},
    "/v1/info": {"get"},
    "/v1/store/stats": {"get"},
    "/v1/store/files": {"get"},
    "/v1/store/files/{key}": {"get"},
    "/v1/store/quarantine": {"get"},
    "/v1/store/quarantine/purge": {"post"},
    "/v1/store/gc": {"post"},
    "/v1/store/snapshots": {"get", "post"},
    "/v1/store/snapshots/{snapshot_id}": {"delete"},
    "/v1/store/snapshots/{snapshot_id}/restore": {"post"},
    "/v1/store/export": {"post"},
    "/v1/store/import": {"post"},
    "/v1/store/archives": {"get"},
    "/v1/store/archives/{archive}": {"delete"},
    "/v1/store/evict": {"post"},
    "/v1/store/compact": {"post"},
    "/v1/store/verify": {"post"},
    "/v1/store/warm": {"post"},
    "/v1/store/reprefill": {"post"},
    "/v1/collections": {"get", "post"},
    "/v1/collections/{collection}": {"get", "put", "patch", "delete"},
    "/v1/collections/{collection}/documents": {"get", "post"},
    "/v1/collections/{collection}/documents/estimate": {"post"},
    "/v1/collections/{collection}/documents/{document}": {"get", "put", "delete"},
    "/v1/jobs": {"get"},
    "/v1/jobs/{job_id}": {"get"},
    "/v1/jobs/{job_id}/cancel": {"post"},
    "/v1/jobs/{job_id}/retry": {"post"},
    "/v1/keys": {"get", "post"},
    "/v1/keys/{key_id}": {"get", "patch", "delete"},
    "/v1/keys/{key_id}/rotate": {"post"},
    "/v1/search": {"post"},
    "/v1/query": {"post"},
}


@cache
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(openapi_document(CONTROLLERS))
    return found


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, op) for path, item in document()["paths"].items() for method, op in item.items()]


def test_every_route_is_there() -> None:
    assert {path: set(item) for path, item in document()["paths"].items()} == ROUTES


@pytest.mark.parametrize(("path", "method"), [(path, method) for path, method, _ in operations()])
def test_every_route_lists_its_problems(path: str, method: str) -> None:
    operation = document()["paths"][path][method]
    assert operation["summary"]
    if not path.startswith("/v1"):
        return
    expected = {"400", "401", "403", "500", "503"}
    if method in ("post", "put", "patch"):
        expected |= {"413", "415"}
    if "{" in path and method != "put":
        expected |= {"404"}
    assert expected <= operation["responses"].keys()
    for status, response in operation["responses"].items():
        if int(status) >= 400:
            content = response["content"]["application/problem+json"]
            assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
        assert response["description"]


def test_every_reference_leads_somewhere() -> None:
    schemas = document()["components"]["schemas"]
    references = set(re.findall(r'"\$ref": ?"([^"]+)"', json.dumps(document())))
    assert references
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in schemas


def test_constraints_and_bodies() -> None:
    schemas = document()["components"]["schemas"]
    assert schemas["QueryRequest"]["properties"]["query"]["maxLength"] == 100_000
    assert schemas["QueryRequest"]["additionalProperties"] is False
    ingest = document()["paths"]["/v1/collections/{collection}/documents"]["post"]
    assert set(ingest["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    answers = document()["paths"]["/v1/query"]["post"]["responses"]["200"]["content"]
    assert set(answers) == {"application/json", "text/event-stream"}


def test_ids_of_operations_are_distinct() -> None:
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(ids) == len(set(ids))


class TestPage:
    def test_the_page_asks_no_other_host(self, fake_http: httpx2.Client) -> None:
        page = fake_http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert not re.search(r"https?://|//[a-z]", page.text)
        assets = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(assets) == 4
        for asset in assets:
            assert asset.startswith("/docs/assets/")
            found = fake_http.get(asset)
            assert found.status_code == 200
            assert found.content
        own = fake_http.get("/docs/assets/docs.js").text
        assert not re.search(r"https?://", own)
        assert "/openapi.json" in own

    def test_the_document_is_served(self, fake_http: httpx2.Client) -> None:
        assert fake_http.get("/openapi.json").json() == document()

    @pytest.mark.parametrize("name", ["none", "..%2Fdocs.html", "%2e%2e", "swagger-ui"])
    def test_only_what_belongs_to_it(self, fake_http: httpx2.Client, name: str) -> None:
        refused = fake_http.get(f"/docs/assets/{name}")
        assert refused.status_code == 404
        assert refused.headers["content-type"] == "application/problem+json"
