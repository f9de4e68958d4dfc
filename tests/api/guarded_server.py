"""A server that asks for keys, and what every refusal of it looks like."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_memory import FakeMemory
from live_server import live_server

from memkv.config import Config, ServerConfig, StoreConfig
from memkv.memory.access_keys import AccessKeys
from memkv.store.catalog_keys import KeyStatements
from memkv.store.database import Database, parse_database_url
from memkv.store.schema import require_schema
from memkv.wire import AccessKeyCreate, NewAccessKey


@dataclass
class Guarded:
    """A server over a memory that has keys."""

    http: httpx2.Client
    keys: AccessKeys
    admin: NewAccessKey
    url: str

    def ask(self, secret: str, method: str, path: str, **more: Any) -> httpx2.Response:
        return self.http.request(method, path, headers={"Authorization": f"Bearer {secret}".strip()}, **more)

    def key(self, **settings: Any) -> NewAccessKey:
        return self.keys.create(AccessKeyCreate(**settings))


def stored_config(data_dir: Path) -> Config:
    return Config(store=StoreConfig(data_dir=str(data_dir)), server=ServerConfig(port=0))


def serve(memory: Any, keys: AccessKeys) -> Iterator[Guarded]:
    admin = keys.create(AccessKeyCreate(scope="admin"))
    with (
        live_server(memory, Config(server=ServerConfig(port=0))) as server,
        httpx2.Client(base_url=server.url, timeout=20) as http,
    ):
        yield Guarded(http, keys, admin, server.url)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Keys of a real store, and a memory that answers questions without a model."""
    database = Database(parse_database_url(None, tmp_path_factory.mktemp("keys")))
    require_schema(database, upgrade=False)
    keys = AccessKeys(KeyStatements(database))
    with closing(database):
        yield from serve(FakeMemory(keys=keys), keys)


def refused(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert ("www-authenticate" in response.headers) == (status == 401)
    problem: dict[str, Any] = response.json()
    assert problem["hint"]
    assert "mkv_" not in re.sub(r"mkv_(\.\.\.|[0-9a-f]{8}\.\.\.)", "", response.text)
    return problem
