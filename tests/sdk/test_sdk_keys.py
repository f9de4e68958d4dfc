"""`client.keys`, and what a client says where its key does not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from client_kinds import KINDS, over_http
from live_server import live_server

from memkv import MemKV
from memkv.config import Config, ServerConfig, StoreConfig
from memkv.errors import (
    AccessKeyNotFound,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    PermissionDeniedError,
)
from memkv.memory.stored import StoredMemory
from memkv.sdk.http import Endpoint
from memkv.sdk.local import LocalSender
from memkv.wire import AccessKeyCreate


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredMemory]:
    config = Config(store=StoreConfig(data_dir=str(tmp_path)), server=ServerConfig(port=0))
    with StoredMemory.open_store(config) as memory:
        yield memory


@pytest.fixture(params=KINDS)
def fresh(
    request: pytest.FixtureRequest, stored: StoredMemory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Each kind of client, of a memory whose first key it makes; then it asks with that."""
    if request.param == "local":
        local = MemKV.__new__(MemKV)
        local._use(LocalSender(stored))  # type: ignore[arg-type]
        yield local
        return
    with live_server(stored, Config(server=ServerConfig(port=0))) as server:
        with MemKV(server.url) as first:
            monkeypatch.setenv("MEMKV_API_KEY", first.keys.create(scope="admin").secret)
        yield from over_http(request.param, server.url)


def test_a_life(fresh: Any) -> None:
    admin = fresh.keys.create(scope="admin", name="second")
    made = fresh.keys.create(name="wiki", scope="write", collections=["wiki"], expires_in=3600)
    assert made.secret.startswith(made.prefix)
    assert made.secret not in repr(made)
    assert fresh.keys.retrieve(made.id).collections == ["wiki"]
    assert [key.id for key in fresh.keys.list(limit=1)][-2:] == [admin.id, made.id]
    changed = fresh.keys.update(made.id, scope="read", expires_in=0)
    assert (changed.scope, changed.expires_at, changed.name) == ("read", "", "wiki")
    assert fresh.keys.rotate(made.id).secret != made.secret
    fresh.keys.delete(made.id)
    assert fresh.keys.retrieve(made.id).status == "revoked"
    with pytest.raises(ConflictError):
        fresh.keys.rotate(made.id)
    with pytest.raises(AccessKeyNotFound) as caught:
        fresh.keys.retrieve("key_0")
    assert caught.value.hint
    with pytest.raises(BadRequestError):
        fresh.keys.create(collections=[])


def test_the_last_admin_key_goes_by_force_alone(fresh: Any) -> None:
    (last,) = list(fresh.keys.list()) or [fresh.keys.create(scope="admin")]
    with pytest.raises(ConflictError, match="last"):
        fresh.keys.delete(last.id)
    with pytest.raises(ConflictError, match="last"):
        fresh.keys.update(last.id, scope="read")
    fresh.keys.delete(last.id, force=True)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_client_whose_key_does_not_do(
    kind: str, stored: StoredMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.keys.create(AccessKeyCreate(scope="admin"))
    reader = stored.keys.create(AccessKeyCreate(collections=["wiki"]))
    asking = contextmanager(over_http)
    with live_server(stored, Config(server=ServerConfig(port=0))) as server:
        with asking(kind, server.url) as client, pytest.raises(AuthenticationError) as caught:
            list(client.collections.list())
        assert "MEMKV_API_KEY" in caught.value.hint
        monkeypatch.setenv("MEMKV_API_KEY", "mkv_wrong")
        with asking(kind, server.url) as client, pytest.raises(AuthenticationError, match="not known"):
            list(client.collections.list())
        monkeypatch.setenv("MEMKV_API_KEY", reader.secret)
        with asking(kind, server.url) as client:
            assert list(client.collections.list()) == []
            refused: list[Callable[[], object]] = [
                lambda: client.collections.delete("wiki"),
                lambda: client.collections.retrieve("other"),
                lambda: client.search("q", collection="other"),
                lambda: client.query("q", collection="other"),
                lambda: client.query_stream("q", collection="other").finish(),
                lambda: client.store.stats(),
            ]
            for ask in refused:
                with pytest.raises(PermissionDeniedError) as denied:
                    ask()
                assert denied.value.hint
                assert reader.secret not in f"{denied.value}{denied.value!r}"


def test_a_secret_is_in_no_repr() -> None:
    endpoint = Endpoint.of("http://127.0.0.1:1", "mkv_secret", None, 0)
    assert endpoint.api_key == "mkv_secret"
    assert "mkv_secret" not in repr(endpoint)
