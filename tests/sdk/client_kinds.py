"""The kinds of clients that the SDK's tests go through, each in the shape of the blocking one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

from memkv import AsyncMemKV, MemKV

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


def over_http(kind: str, url: str) -> Iterator[Any]:
    if kind == "sync":
        with MemKV(url, timeout=60) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        asynchronous = AsyncMemKV(url, timeout=60)
        yield Blocking(asynchronous, runner)
        runner.run(asynchronous.close())
