"""uvicorn's HTTP/1.1 protocol, with a deadline for request headers and a problem for what is no HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from memkv.api.errors import PROBLEM_JSON, encode_problem
from uvicorn.protocols.http.h11_impl import H11Protocol

from memkv.errors import BadRequestError
from memkv.wire import problem_for

HEADER_SECONDS = (
    30.0  # for the whole head of a request: a client that drips it does not hold a socket for ever
)


class HTTPProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._watch_head()
        else:
            self._unwatch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        body = encode_problem(problem_for(BadRequestError(msg, hint="speak HTTP/1.1, without TLS")))
        headers = [
            (b"content-type", PROBLEM_JSON.encode("ascii")),
            (b"content-length", str(len(body)).encode("ascii")),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_head(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _unwatch_head(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _give_up(self) -> None:
        self._head_deadline = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()
