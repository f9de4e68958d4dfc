"""A query's events as server-sent events (`text/event-stream`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send
from memkv.api.errors import ClientDisconnected, problem_of
from memkv.api.event_pump import EventPump

from memkv.errors import MemKVError
from memkv.wire import QueryEvent, QueryFailed

PING_SECONDS = 15.0  # of silence, after which a comment shows proxies and clients that the stream lives
SEND_SECONDS = 60.0  # a client that reads nothing for so long is cut off

_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}  # the second: nginx passes events on at once


class EventStream(Response[bytes]):
    """Answers with the events of `pump`.

    The pump starts with the answer, so that nothing runs for an answer that is never sent.
    """

    def __init__(self, pump: EventPump) -> None:
        super().__init__(content=b"")
        self._pump = pump

    def to_asgi_response(self, app: Any, request: Request[Any, Any, Any], **_: Any) -> ASGIResponse:
        return _EventStreamBody(self._pump, request)


class _EventStreamBody(ASGIResponse):
    __slots__ = ("_instance", "_pump", "_request_id", "_sent")

    _should_set_content_length = False

    def __init__(self, pump: EventPump, request: Request[Any, Any, Any]) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        self._pump = pump
        self._instance = request.scope["path"]
        self._request_id = request.scope.get("state", {}).get("request_id", "")
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._pump as pump:
            frames = self._frames(pump)
            first = await anext(frames, b"")  # what fails here is a problem with its own status
            await self.start_response(send)
            with contextlib.suppress(ClientDisconnected):
                await _send(send, first)
                await _send(send, await self._send_rest(frames, send), more_body=False)

    async def _send_rest(self, frames: AsyncIterator[bytes], send: Send) -> bytes:
        """Sends all frames; returns the last one to send: the error, if there was one."""
        try:
            async for frame in frames:
                await _send(send, frame)
        except MemKVError as error:
            problem = problem_of(error, instance=self._instance, request_id=self._request_id)
            return self._frame(QueryFailed(problem=problem))
        return b""

    async def _frames(self, pump: EventPump) -> AsyncIterator[bytes]:
        while True:
            try:
                event = await pump.next(PING_SECONDS)
            except TimeoutError:
                yield b": ping\n\n"
                continue
            if event is None:
                return
            yield self._frame(event)

    def _frame(self, event: QueryEvent) -> bytes:
        self._sent += 1
        kind = str(event.__struct_config__.tag)
        data = msgspec.json.encode(event)  # holds no line break: JSON escapes them
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (self._sent, kind.encode("ascii"), data)


async def _send(send: Send, body: bytes, *, more_body: bool = True) -> None:
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
    except TimeoutError as error:
        raise ClientDisconnected("the client does not read") from error
