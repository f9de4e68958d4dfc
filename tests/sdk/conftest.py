"""One shape for three clients: blocking and asynchronous over HTTP, and in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from client_kinds import KINDS, over_http
from fake_memory import FakeMemory
from live_server import LiveServer, live_server
from served_memory import collection, memory

from memkv import MemKV
from memkv.config import Config, ServerConfig
from memkv.sdk.local import LocalSender

if TYPE_CHECKING:
    from memkv.memory import Memory

__all__ = ["collection", "memory"]


@pytest.fixture(scope="session")
def real_server(memory: Memory) -> Iterator[LiveServer]:
    with live_server(memory, Config(server=ServerConfig(port=0))) as server:
        yield server


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, memory: Memory) -> Iterator[Any]:
    """Each kind of client, of the same real memory."""
    if request.param == "local":
        local = MemKV.__new__(MemKV)
        local._use(LocalSender(memory))  # `MemKV.local` opens one of its own: see test_sdk_local
        yield local
        return
    url = request.getfixturevalue("real_server").url
    yield from over_http(request.param, url)


@pytest.fixture
def fake() -> FakeMemory:
    return FakeMemory()


@pytest.fixture(params=KINDS)
def fake_client(request: pytest.FixtureRequest, fake: FakeMemory) -> Iterator[Any]:
    """Each kind of client, of a fake memory."""
    if request.param == "local":
        local = MemKV.__new__(MemKV)
        local._use(LocalSender(fake))  # type: ignore[arg-type]
        yield local
        return
    with live_server(fake, Config(server=ServerConfig(port=0))) as server:
        yield from over_http(request.param, server.url)
