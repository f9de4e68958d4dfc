"""Every route refuses whoever may not ask it."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_memory import FakeMemory
from guarded_server import Guarded, guarded, refused, stored_config
from litestar import Litestar
from litestar.routes import HTTPRoute
from live_server import live_server
from memkv.api.access import SCOPES, needs_of
from memkv.api.app import create_app
from test_api_openapi import document

from memkv.config import Config, ServerConfig
from memkv.memory.stored import StoredMemory
from memkv.store import catalog_keys

__all__ = ["guarded"]

OPEN = {"/healthz", "/readyz", "/docs", "/docs/assets/{name}", "/openapi.json"}
SCOPE_OF = {
    ("GET", "/metrics"): "read",
    ("GET", "/v1/info"): "read",
    ("GET", "/v1/collections"): "read",
    ("POST", "/v1/collections"): "write",
    ("GET", "/v1/collections/{collection}"): "read",
    ("PUT", "/v1/collections/{collection}"): "write",
    ("PATCH", "/v1/collections/{collection}"): "write",
    ("DELETE", "/v1/collections/{collection}"): "write",
    ("GET", "/v1/collections/{collection}/documents"): "read",
    ("POST", "/v1/collections/{collection}/documents"): "write",
    ("POST", "/v1/collections/{collection}/documents/estimate"): "read",
    ("GET", "/v1/collections/{collection}/documents/{document}"): "read",
    ("PUT", "/v1/collections/{collection}/documents/{document}"): "write",
    ("DELETE", "/v1/collections/{collection}/documents/{document}"): "write",
    ("GET", "/v1/jobs"): "read",
    ("GET", "/v1/jobs/{job_id}"): "read",
    ("POST", "/v1/jobs/{job_id}/cancel"): "write",
    ("POST", "/v1/jobs/{job_id}/retry"): "write",
    ("POST", "/v1/search"): "read",
    ("POST", "/v1/query"): "read",
}  # everything else is an administrator's


def routes(app: Litestar) -> list[tuple[str, str, Any]]:
    """(method, path, handler) of every route that the application has, always in the same order."""
    found = [
        (method, route.path_format, handler)
        for route in app.routes
        if isinstance(route, HTTPRoute)
        for handler in route.route_handlers
        for method in handler.http_methods
        if method != "OPTIONS"
    ]
    return sorted(found, key=lambda each: each[:2])


ROUTES = routes(create_app(FakeMemory(), Config()))  # type: ignore[arg-type]
ASKED = [(method, path) for method, path, _ in ROUTES if path not in OPEN]


def filled(path: str) -> str:
    return re.sub(r"\{[a-z_:]+\}", "0" * 16, path)


def least(method: str, path: str) -> str:
    return SCOPE_OF.get((method, path), "admin")


def test_every_route_says_who_may_ask() -> None:
    assert len(ROUTES) > 40
    for method, path, handler in ROUTES:
        assert "needs" in handler.opt, f"{method} {path} says nothing; without opt=requires(...) it is admin"
        needs = needs_of(handler)
        assert needs.scope == (None if path in OPEN else least(method, path)), path
        if "{collection}" in path:
            assert needs.within == "path"


def test_the_description_says_it_too() -> None:
    paths = document()["paths"]
    assert set(document()["components"]["securitySchemes"]) == {"bearer", "header"}
    for method, path, handler in ROUTES:
        operation = paths.get(path, {}).get(method.lower())
        if operation is None:
            assert path in OPEN
        elif path in OPEN:
            assert "security" not in operation
        else:
            scope = needs_of(handler).scope
            assert operation["security"] == [{"bearer": [scope]}, {"header": [scope]}]
            assert {"401", "403"} <= operation["responses"].keys()


@pytest.mark.parametrize("path", sorted(OPEN))
def test_probes_and_the_description_are_open(guarded: Guarded, path: str) -> None:
    response = guarded.http.get(path.replace("{name}", "docs.js"), headers={"Host": "memkv.example"})
    assert response.status_code == 200


@pytest.fixture(scope="module")
def worthless(guarded: Guarded) -> dict[str, str]:
    """Secrets that no key has, or has any more."""
    made = {name: guarded.key(scope="admin") for name in ("revoked", "expired", "rotated", "good")}
    guarded.keys.revoke(made["revoked"].id)
    guarded.keys.rotate(made["rotated"].id)
    statements = guarded.keys._statements
    with statements._database.unfenced_write() as connection:
        table = catalog_keys.AccessKey.__table__
        connection.execute(
            table.update()
            .where(table.c.id == made["expired"].id)
            .values(expires_at=catalog_keys.now() - timedelta(seconds=1))
        )
    good = made["good"].secret
    return {
        "none": "",
        "unknown": "mkv_" + "0" * 64,
        "malformed": "password",
        "longer": f"{good}0",
        "upper": good.upper(),
        "revoked": made["revoked"].secret,
        "expired": made["expired"].secret,
        "rotated": made["rotated"].secret,
    }


class TestEveryRoute:
    @pytest.mark.parametrize(("method", "path"), ASKED)
    def test_without_a_valid_key(
        self, guarded: Guarded, worthless: dict[str, str], method: str, path: str
    ) -> None:
        for name, secret in worthless.items():
            problem = refused(guarded.ask(secret, method, filled(path)), 401)
            assert problem["code"] == "unauthenticated", name
        refused(guarded.http.request(method, filled(path)), 401)
        refused(guarded.http.request(method, filled(path), headers={"Authorization": "Basic eDp5"}), 401)

    @pytest.mark.parametrize(("method", "path"), ASKED)
    def test_with_too_small_a_scope(self, guarded: Guarded, method: str, path: str) -> None:
        scope = least(method, path)
        for smaller in SCOPES[: SCOPES.index(scope)]:  # type: ignore[arg-type]
            secret = guarded.key(scope=smaller).secret
            problem = refused(guarded.ask(secret, method, filled(path)), 403)
            assert problem["code"] == "permission_denied"
            assert scope in problem["hint"]

    @pytest.mark.parametrize(("method", "path"), ASKED)
    def test_with_enough(self, guarded: Guarded, method: str, path: str) -> None:
        """Whatever the route then says of the request, it is neither 401 nor 403."""
        if path == "/v1/keys/{key_id}/rotate" or "snapshot" in path:
            return
        for scope in SCOPES[SCOPES.index(least(method, path)) :]:  # type: ignore[arg-type]
            response = guarded.ask(guarded.key(scope=scope).secret, method, filled(path))
            assert response.status_code not in (401, 403), response.text

    @pytest.mark.parametrize(("method", "path"), ASKED)
    def test_with_a_key_for_another_collection(self, guarded: Guarded, method: str, path: str) -> None:
        """403 where the path names a collection or the route is about the whole store; the rest is below."""
        secret = guarded.key(scope="write", collections=["another"]).secret
        if "{collection}" in path or least(method, path) == "admin" or path == "/metrics":
            refused(guarded.ask(secret, method, filled(path)), 403)


def test_a_key_says_who_asks_in_either_header(guarded: Guarded) -> None:
    secret = guarded.admin.secret
    for headers in (
        {"Authorization": f"Bearer {secret}"},
        {"Authorization": f"bearer  {secret}"},
        {"X-API-Key": secret},
        {"X-API-Key": secret, "Authorization": "Basic eDp5"},
    ):
        assert guarded.http.get("/v1/info", headers=headers).status_code == 200, headers
    wrong_first = {"X-API-Key": secret, "Authorization": "Bearer none"}
    refused(guarded.http.get("/v1/info", headers=wrong_first), 401)


def test_a_key_is_proof_whatever_the_server_is_called(guarded: Guarded) -> None:
    for more in ({"Host": "memkv.example"}, {"Sec-Fetch-Site": "cross-site"}):
        headers = {"Authorization": f"Bearer {guarded.admin.secret}", **more}
        made = guarded.http.put("/v1/collections/called", json={}, headers=headers)
        assert made.status_code in (200, 201)
        refused(guarded.http.put("/v1/collections/called", json={}, headers=more), 401)


def test_a_body_is_not_read_of_who_may_not_send_it(guarded: Guarded) -> None:
    refused(guarded.http.post("/v1/query", content=b"{" * 10), 401)


class TestAServerWithoutKeys:
    @pytest.mark.parametrize(("address", "status"), [("127.0.0.1", 200), ("10.0.0.1", 403)])
    def test_answers_this_machine_alone(self, address: str, status: int) -> None:
        """Also where it listens elsewhere, since it had keys when it began to."""
        assert self.ask(address, insecure=False) == status

    def test_unless_told_otherwise(self) -> None:
        assert self.ask("10.0.0.1", insecure=True) == 200

    def ask(self, address: str, *, insecure: bool) -> int:
        """The status of an answer to a request that came to an address of the server's."""
        app = create_app(FakeMemory(), Config(server=ServerConfig(insecure=insecure)))  # type: ignore[arg-type]

        async def moved(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "server": (address, 8000)}, receive, send)

        async def get() -> int:
            transport = httpx2.ASGITransport(moved)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return (await client.get("/v1/info")).status_code

        return asyncio.run(get())

    def test_keys_are_asked_for_whatever_it_is_told(self, guarded: Guarded) -> None:
        config = Config(server=ServerConfig(port=0, insecure=True))
        with live_server(FakeMemory(keys=guarded.keys), config) as server:
            refused(httpx2.get(f"{server.url}/v1/info"), 401)

    def test_a_key_that_nothing_checks_is_no_proof(self, fake_http: httpx2.Client) -> None:
        headers = {"X-API-Key": "mkv_" + "0" * 64, "Host": "evil.example"}
        assert fake_http.get("/v1/info", headers=headers).status_code == 403

    def test_the_first_key_closes_it_at_once(self, tmp_path: Path) -> None:
        config = stored_config(tmp_path)
        with (
            StoredMemory.open_store(config) as memory,
            live_server(memory, config) as server,
            httpx2.Client(base_url=server.url) as http,
        ):
            assert http.get("/v1/collections").status_code == 200
            early = http.post("/v1/keys", json={"scope": "read"})
            assert (early.status_code, early.json()["code"]) == (409, "conflict")
            made = http.post("/v1/keys", json={"scope": "admin", "name": "ops"})
            assert made.status_code == 201
            assert made.headers["cache-control"] == "no-store"
            refused(http.get("/v1/collections"), 401)
            http.headers["Authorization"] = f"Bearer {made.json()['secret']}"
            assert http.get("/v1/collections").status_code == 200
            assert http.get(made.headers["location"]).json()["name"] == "ops"
