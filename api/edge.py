"""The outermost layer of the server: what is decided about a request before anything reads its body.

Request id and access log; then whether the server drains, the body's encoding and its announced length. The
body itself is counted as the application reads it. Who asks is for `memkv.api.access` to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import structlog
from litestar.enums import ScopeType
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from memkv.api.drain import Drain
from memkv.api.errors import (
    PROBLEM_JSON,
    ClientDisconnected,
    encode_problem,
    problem_headers,
    problem_of,
)

from memkv.config import ServerConfig
from memkv.errors import (
    EngineClosed,
    MemKVError,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
)

PROBES = frozenset({"/healthz", "/readyz"})
BODY_SECONDS = 120.0  # for the whole body: a client that drips it does not hold a request open for ever
DISCARD_SECONDS = 30.0  # for the rest of a body that is refused

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_log = structlog.get_logger("memkv.api.access")


class Edge:
    """Wraps an ASGI application.

    Args:
        app: the application.
        drain: counts the requests and refuses new ones once the server is about to stop.
        config: a body longer than its `max_body_bytes` is 413 before it is read, or as soon as that much of
            it has come.
    """

    def __init__(self, app: ASGIApp, drain: Drain, config: ServerConfig) -> None:
        self._app = app
        self._drain = drain
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        exchange = _Exchange.of(scope)
        scope["state"]["request_id"] = exchange.request_id
        with structlog.contextvars.bound_contextvars(request_id=exchange.request_id):
            try:
                await self._answer(exchange, scope, receive, send)
            finally:
                exchange.log()

    async def _answer(self, exchange: _Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        body = _BodyReader(receive, self._config.max_body_bytes, exchange)
        end: Message | None = None  # of an answer that came before the body's end

        async def tracked_send(message: Message) -> None:
            nonlocal end
            exchange.track(message)
            if exchange.complete and not body.complete:
                end = {"type": "http.response.body", "body": b"", "more_body": False}
                message = {**message, "more_body": True}  # type: ignore[assignment]
            await send(message)

        if scope["path"] in PROBES:
            await self._app(scope, receive, tracked_send)
        elif (refusal := self._refusal(exchange)) is not None:
            await _send_problem(refusal, exchange, tracked_send)
        else:
            with self._drain.request():
                await self._app(scope, body, tracked_send)
        if end is not None:
            await body.discard()
            await send(end)

    def _refusal(self, exchange: _Exchange) -> MemKVError | None:
        if self._drain.draining:
            return EngineClosed("the server is about to stop", hint="try another server, or again later")
        encoding = exchange.header(b"content-encoding")
        if encoding and encoding.lower() != "identity":
            return UnsupportedMediaTypeError(
                f"request bodies with Content-Encoding {encoding[:64]} are not read",
                hint="send it uncompressed",
            )
        length = exchange.header(b"content-length")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._config.max_body_bytes:
            return too_large(self._config.max_body_bytes)
        return None


def too_large(max_body_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body is larger than {max_body_bytes:,} bytes",
        hint="send less at once, or raise server.max_body_bytes",
    )


class _BodyReader:
    """`receive` that counts the body's bytes, waits only so long, and tells of a client that left.

    Attributes:
        complete: nothing more will come.
    """

    def __init__(self, receive: Receive, max_body_bytes: int, exchange: _Exchange) -> None:
        self._receive = receive
        self._left = max_body_bytes
        self._limit = max_body_bytes
        self._deadline = time.monotonic() + BODY_SECONDS
        self._awaits_leave = exchange.header(b"expect").lower() == "100-continue"
        self.complete = exchange.header(b"content-length") in ("", "0") and not exchange.header(
            b"transfer-encoding"
        )

    async def discard(self) -> None:
        """Reads on to the body's end and keeps nothing, but only so long.

        Many clients send all of it before they read the answer, and a connection that closes on bytes which
        nobody has read is reset: then the answer is lost.
        """
        if self._awaits_leave:  # which it has not got: it will not send
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self.complete:
                    message = await self._receive()
                    self.complete = not message.get("more_body", False)

    async def __call__(self) -> Any:
        self._awaits_leave = False
        if self.complete:
            return await self._receive()
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError as error:
            raise HTTPException("the body did not come in time", status_code=408) from error
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the body ended early")
        if message["type"] == "http.request":
            self._left -= len(message["body"])
            if self._left < 0:
                raise too_large(self._limit)
            self.complete = not message.get("more_body", False)
        return message


@dataclass(slots=True)
class _Exchange:
    """One request and its answer, as the access log shows them. Holds no body and no query string."""

    scope: Any
    headers: list[tuple[bytes, bytes]]
    request_id: str = ""
    status: int = 0
    sent_bytes: int = 0
    complete: bool = False
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, scope: Any) -> _Exchange:
        exchange = cls(scope=scope, headers=list(scope["headers"]))
        scope.setdefault("state", {})
        given = exchange.header(b"x-request-id")
        exchange.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        return exchange

    def header(self, name: bytes) -> str:
        """The first header of that name; empty where there is none."""
        return next(
            (value.decode("latin-1") for key, value in self.headers if key.lower() == name), ""
        ).strip()

    def track(self, message: Message) -> Message:
        """Adds the request id to an answer and takes note of it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id.encode("ascii"))]
        elif message["type"] == "http.response.body":
            self.sent_bytes += len(message["body"])
            self.complete = not message.get("more_body", False)
        return message

    def log(self) -> None:
        # A probe a second is no news, unless it fails.
        quiet = self.scope["path"] in PROBES and self.status == 200
        write = _log.debug if quiet else _log.info
        client = self.scope.get("client")
        write(
            "request",
            method=self.scope["method"],
            path=self.scope.get("path_template")
            or self.scope.get("raw_path", b"").decode("ascii", "replace"),
            status=self.status,
            ms=round((time.perf_counter() - self.started) * 1000, 1),
            bytes=self.sent_bytes,
            client=client[0] if client else "",
            **({"key": key} if (key := self.scope["state"].get("key")) else {}),
            **({} if self.complete else {"cut": True}),
        )


async def _send_problem(error: MemKVError, exchange: _Exchange, send: Any) -> None:
    problem = problem_of(error, instance=exchange.scope["path"], request_id=exchange.request_id)
    body = encode_problem(problem)
    headers = {
        "content-type": PROBLEM_JSON,
        "content-length": str(len(body)),
        **{name.lower(): value for name, value in problem_headers(error).items()},
    }
    encoded = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
