"""Servers over the real memory and over a fake one, and clients that speak plain HTTP to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx2
import pytest
from fake_memory import FakeMemory
from live_server import LiveServer, live_server
from served_memory import collection, memory

from memkv.config import Config, ServerConfig

if TYPE_CHECKING:
    from memkv.memory import Memory

__all__ = ["collection", "memory"]

SERVER_CONFIG = ServerConfig(port=0, threads=4, queue_seconds=0.3, max_body_bytes=100_000)


@pytest.fixture(scope="session")
def http(memory: Memory) -> Iterator[httpx2.Client]:
    """A client of a server over the real memory."""
    with (
        live_server(memory, Config(server=ServerConfig(port=0))) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def fake_server() -> Iterator[tuple[FakeMemory, LiveServer]]:
    """One server over a fake memory for the session; see `fake` and `server`."""
    fake = FakeMemory()
    with live_server(fake, Config(server=SERVER_CONFIG)) as server:
        yield fake, server


@pytest.fixture
def fake(fake_server: tuple[FakeMemory, LiveServer]) -> FakeMemory:
    """The memory behind `server` and `fake_http`, as new."""
    fake_server[0].reset()
    return fake_server[0]


@pytest.fixture
def server(fake: FakeMemory, fake_server: tuple[FakeMemory, LiveServer]) -> LiveServer:
    """A server over `fake`: 4 threads, bodies of at most 100,000 bytes."""
    return fake_server[1]


@pytest.fixture(scope="session")
def _fake_client(fake_server: tuple[FakeMemory, LiveServer]) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=fake_server[1].url, timeout=20) as client:
        yield client


@pytest.fixture
def fake_http(server: LiveServer, _fake_client: httpx2.Client) -> httpx2.Client:
    """A client of `server`."""
    return _fake_client
