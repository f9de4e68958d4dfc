"""A running generation between its worker thread and the event loop.

The thread pulls events from the engine as fast as they come and never waits for the client: the queue between
is bounded by the answer's own length, so a client that reads slowly holds no block of the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from litestar.types import Receive
from memkv.api.errors import ClientDisconnected, log_fault
from memkv.api.memory_calls import MemoryCalls

from memkv.errors import EngineClosed, InternalServerError, MemKVError
from memkv.wire import QueryEvent, QueryRequest

if TYPE_CHECKING:
    from memkv.memory.answering import QueryStream


class EventPump:
    """The events of one query, as an asynchronous source.

    Use as `async with EventPump(...) as pump`: entering takes a thread (`Overloaded` if none becomes free in
    time), leaving cancels what still runs; its blocks are then free within one step of the engine.

    Args:
        calls: where threads come from.
        request: the query.
        receive: the request's ASGI channel, its body already read: it tells when the client goes away.
    """

    def __init__(self, calls: MemoryCalls, request: QueryRequest, receive: Receive) -> None:
        self._calls = calls
        self._request = request
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[QueryEvent | MemKVError | None] = asyncio.Queue()
        self._next: asyncio.Future[QueryEvent | MemKVError | None] | None = None
        self._ends: set[asyncio.Future[None]] = set()
        self._lock = threading.Lock()
        self._stream: QueryStream | None = None
        self._closed = False

    async def __aenter__(self) -> EventPump:
        await self._calls.start_generation(self._pump)
        self._ends = {
            asyncio.ensure_future(self._calls.drain.wait_cut()),
            asyncio.ensure_future(_wait_disconnect(self._receive)),
        }
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            stream = self._stream
        for future in self._ends | ({self._next} if self._next is not None else set()):
            future.cancel()
        if stream is not None:
            self._calls.cancel(stream.close)

    async def next(self, timeout: float | None = None) -> QueryEvent | None:
        """The next event; None at the end.

        Raises:
            TimeoutError: nothing came for `timeout` seconds.
            ClientDisconnected: nobody waits for the answer any more.
            MemKVError: what the query failed with, or `EngineClosed` when the server stops.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(self._queue.get())
        waiting: list[asyncio.Future[Any]] = [self._next, *self._ends]
        done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._calls.drain.is_cut:
            raise EngineClosed("the server stopped before the answer was complete", hint="ask again later")
        if not done:
            raise TimeoutError
        if self._next not in done:
            raise ClientDisconnected
        event = self._next.result()
        self._next = None
        if isinstance(event, MemKVError):
            raise event
        return event

    def _pump(self) -> None:
        """Runs in the worker thread."""
        try:
            with self._calls.memory.query_stream(self._request) as stream:
                with self._lock:
                    self._stream = stream
                    closed = self._closed
                if closed:
                    return
                for event in stream:
                    self._put(event)
        except MemKVError as error:
            self._put(error)
        except Exception as error:  # noqa: BLE001  the top of a thread
            log_fault(error)
            self._put(
                InternalServerError(
                    "an unexpected fault", hint="the server's log has it under this request id"
                )
            )
        finally:
            self._put(None)

    def _put(self, item: QueryEvent | MemKVError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
