"""An answer while it is made: typed events as they come, the whole response at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

from memkv.errors import APIConnectionError, BadRequestError
from memkv.sdk.replies import error_of_problem
from memkv.wire import QueryCompleted, QueryEvent, QueryFailed, QueryResponse


class EventSource(Protocol):
    """Where events come from; closing it cancels the generation."""

    def __iter__(self) -> Iterator[QueryEvent]: ...
    def close(self) -> None: ...


class AsyncEventSource(Protocol):
    def __aiter__(self) -> AsyncIterator[QueryEvent]: ...
    async def aclose(self) -> None: ...


class _Progress:
    """What both streams know of their answer."""

    def __init__(self) -> None:
        self._response: QueryResponse | None = None

    @property
    def response(self) -> QueryResponse:
        """The whole answer; raises `BadRequestError` before the stream has ended."""
        if self._response is None:
            raise BadRequestError("the stream has not ended", hint="read its events first, or call finish()")
        return self._response

    def _take(self, event: QueryEvent) -> QueryEvent:
        if isinstance(event, QueryFailed):
            raise error_of_problem(event.problem)
        if isinstance(event, QueryCompleted):
            self._response = event.response
        return event

    def _end(self) -> None:
        if self._response is None:
            raise APIConnectionError("the stream ended before the answer", hint="ask again")


class AnswerStream(_Progress):
    """Events of one answer.

        with client.query_stream("...", collection="handbook") as stream:
            for event in stream:
                if isinstance(event, OutputDelta):
                    print(event.text, end="")
        stream.response.citations

    The question is asked when the block is entered or the first event read. Leaving the block, or `close()`,
    cancels what still runs.
    """

    def __init__(self, open_source: Callable[[], EventSource]) -> None:
        super().__init__()
        self._open_source = open_source
        self._source: EventSource | None = None
        self._events: Iterator[QueryEvent] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[QueryEvent]:
        """Raises `MemKVError`: what the server says went wrong midway."""
        if self._events is None:
            self._events = self._read(self._start())
        return self._events

    def finish(self) -> QueryResponse:
        """Reads what is left and returns the response."""
        for _ in self:
            pass
        return self.response

    def close(self) -> None:
        """Cancels the generation if it still runs."""
        if self._source is not None:
            self._source.close()

    def _start(self) -> EventSource:
        if self._source is None:
            self._source = self._open_source()
        return self._source

    def _read(self, source: EventSource) -> Iterator[QueryEvent]:
        try:
            for event in source:
                yield self._take(event)
        finally:
            source.close()
        self._end()


class AsyncAnswerStream(_Progress):
    """The same for `async with` and `async for`."""

    def __init__(self, open_source: Callable[[], Awaitable[AsyncEventSource]]) -> None:
        super().__init__()
        self._open_source = open_source
        self._source: AsyncEventSource | None = None
        self._events: AsyncIterator[QueryEvent] | None = None

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[QueryEvent]:
        """Raises `MemKVError`: what the server says went wrong midway."""
        if self._events is None:
            self._events = self._read()
        return self._events

    async def finish(self) -> QueryResponse:
        """Reads what is left and returns the response."""
        async for _ in self:
            pass
        return self.response

    async def close(self) -> None:
        """Cancels the generation if it still runs."""
        if self._source is not None:
            await self._source.aclose()

    async def _start(self) -> AsyncEventSource:
        if self._source is None:
            self._source = await self._open_source()
        return self._source

    async def _read(self) -> AsyncIterator[QueryEvent]:
        source = await self._start()
        try:
            async for event in source:
                yield self._take(event)
        finally:
            await source.aclose()
        self._end()
