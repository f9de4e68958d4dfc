"""One shape for three clients: blocking and asynchronous over HTTP, and in this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from fake_memory import FakeMemory
from live_server import LiveServer, live_server
from served_memory import collection, memory

from memkv import AsyncMemKV, MemKV
from memkv.config import Config, ServerConfig
from memkv.sdk.local import LocalSender

if TYPE_CHECKING:
    from memkv.memory import Memory

__all__ = ["collection", "memory"]

KINDS = ("sync", "async", "local")


class Blocking:
    """An asynchronous client as a blocking one, so that one test body serves both.

    Attributes are wrapped, awaitables awaited, asynchronous iterators iterated and contexts entered, all in
    one event loop.
    """

    def __init__(self, inner: Any, runner: asyncio.Runner) -> None:
        self._inner = inner
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return self._wrap(getattr(self._inner, name))

    def __iter__(self) -> Iterator[Any]:
        events: AsyncIterator[Any] = self._inner.__aiter__()
        while True:
            try:
                yield self._runner.run(_next(events))
            except StopAsyncIteration:
                return

    def __enter__(self) -> Blocking:
        self._runner.run(_await(self._inner.__aenter__()))
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(_await(self._inner.__aexit__(*error)))

    def _wrap(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            value = self._runner.run(_await(value))
        if callable(value):
            return lambda *arguments, **keywords: self._wrap(value(*arguments, **keywords))
        if type(value).__module__.startswith("memkv.sdk"):
            return Blocking(value, self._runner)
        return value


async def _await(awaitable: Any) -> Any:
    return await awaitable


async def _next(events: AsyncIterator[Any]) -> Any:
    return await anext(events)


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


def over_http(kind: str, url: str) -> Iterator[Any]:
    if kind == "sync":
        with MemKV(url, timeout=60) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        asynchronous = AsyncMemKV(url, timeout=60)
        yield Blocking(asynchronous, runner)
        runner.run(asynchronous.close())
