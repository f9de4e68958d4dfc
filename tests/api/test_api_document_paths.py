"""Which document a path names, however it is written."""

from __future__ import annotations

import httpx2
import pytest

TEXT = {"text": "The lamp is lit at dusk."}


def sent(http: httpx2.Client, method: str, path: str, body: dict[str, str] | None = None) -> httpx2.Response:
    """As it is written: no client's own reading of escapes."""
    return http.request(method, httpx2.URL(http.base_url, raw_path=path.encode()), json=body)


@pytest.mark.parametrize("name", ["documents", "v1", "collections", "c"])
@pytest.mark.parametrize("key", ["a", "documents/a", "a/documents/b", "a/documents/"])
def test_a_collection_and_a_document_may_be_called_as_parts_of_the_route_are(
    fake_http: httpx2.Client, name: str, key: str
) -> None:
    path = f"/v1/collections/{name}"
    assert sent(fake_http, "PUT", path, {}).status_code == 201
    made = sent(fake_http, "PUT", f"{path}/documents/{key}", TEXT).json()["documents"][0]
    assert made["external_id"] == key
    assert sent(fake_http, "GET", f"{path}/documents/{key}").json()["id"] == made["id"]
    assert sent(fake_http, "GET", f"{path}/documents/{made['id']}").json()["external_id"] == key


@pytest.mark.parametrize("path", ["/v1/collections/c/%64ocuments/a", "//v1//%63ollections/%63//documents/a"])
def test_escapes_and_slashes_of_the_route_itself_do_not_matter(fake_http: httpx2.Client, path: str) -> None:
    sent(fake_http, "PUT", "/v1/collections/c", {})
    sent(fake_http, "PUT", "/v1/collections/c/documents/a", TEXT)
    assert sent(fake_http, "GET", path).json()["external_id"] == "a"


@pytest.mark.parametrize("path", ["c%2Fdocuments%2Fa", "c%2Fdocuments/a", "c%2Fdocuments%2Fa/documents/b"])
def test_an_escaped_slash_parts_nothing(fake_http: httpx2.Client, path: str) -> None:
    sent(fake_http, "PUT", "/v1/collections/c", {})
    sent(fake_http, "PUT", "/v1/collections/c/documents/a", TEXT)
    for method, body in (("GET", None), ("PUT", TEXT), ("DELETE", None)):
        refused = sent(fake_http, method, f"/v1/collections/{path}", body)
        assert (refused.status_code, refused.json()["code"]) == (404, "not_found")
