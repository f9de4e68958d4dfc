"""Every error of the server as one `application/problem+json` body with a stable code (RFC 9457).

The only place of the server that catches what nobody expected: a client then learns a request id and nothing
of what happened inside; the log gets the frames, without the text of any document.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
    ValidationException,
)
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ExceptionHandlersMap

from memkv.errors import (
    AuthenticationError,
    DatabaseUnavailable,
    EngineClosed,
    InternalServerError,
    MemKVError,
    Overloaded,
    PoolExhausted,
    RateLimitError,
    error_for,
)
from memkv.validation import Violation
from memkv.wire import Problem, ProblemItem, problem_for

PROBLEM_JSON = "application/problem+json"

# Seconds after which the same request may succeed.
_RETRY_AFTER: Mapping[type[MemKVError], int] = {
    Overloaded: 1,
    PoolExhausted: 1,
    RateLimitError: 1,
    DatabaseUnavailable: 1,
    EngineClosed: 5,
}

_DESCRIPTIONS = {
    400: "The request is malformed or breaks a rule",
    401: "No access key was sent, or none that is valid",
    403: "The access key does not allow it; while there are no keys: the request comes from elsewhere",
    404: "There is no such thing",
    409: "It exists already, or does not fit what the store holds",
    413: "The body, or the prompt, is too large",
    415: "The content type or encoding is not supported",
    422: "Well-formed, but not a document that can be read",
    424: "The model failed",
    500: "A fault of the server; the log has it under the request id",
    503: "Not now: overloaded, starting, draining or the database is away; see Retry-After",
    507: "No space left",
}

_INVALID_HINT = "every field and its limits are described at /docs"

_UNREADABLE = (RecursionError, OverflowError, UnicodeError)

_CLIENT_GONE = Problem(  # nobody reads it; the access log shows its status
    type="urn:memkv:problem:client_closed_request",
    title="Client closed request",
    status=499,
    detail="the client went away before its answer",
    code="client_closed_request",
)

_log = structlog.get_logger("memkv.api")


class ClientDisconnected(Exception):
    """The client went away; whatever was done for it may stop."""


def problems(*statuses: int) -> dict[int, ResponseSpec]:
    """The problem responses that a route documents: the given ones, and those that any route may give."""
    return {
        status: ResponseSpec(
            data_container=Problem,
            media_type=PROBLEM_JSON,
            description=_DESCRIPTIONS[status],
            generate_examples=False,
        )
        for status in sorted({*statuses, 400, 401, 403, 500, 503})
    }


def problem_of(error: BaseException, *, instance: str = "", request_id: str = "") -> Problem:
    """The problem that `error` becomes; anything unexpected is a 500 that says nothing of it."""
    if isinstance(error, MemKVError):
        return problem_for(error, instance=instance, request_id=request_id)
    if isinstance(error, Violation):
        item = ProblemItem(message=error.message, loc=error.loc, code="invalid")
        problem = _problem(400, str(error), instance, request_id, [item])
        hint = f"{error.hint}; {_INVALID_HINT}" if error.hint else _INVALID_HINT
        return msgspec.structs.replace(problem, hint=hint)
    if isinstance(error, ValidationException):
        items = _items(error.extra)
        detail = "; ".join(f"{item.loc}: {item.message}" if item.loc else item.message for item in items)
        return _problem(400, detail or _plain(error.detail), instance, request_id, items)
    if isinstance(error, HTTPException) and error.status_code < 500:
        detail, hint = _explain(error)
        problem = _problem(error.status_code, detail, instance, request_id)
        return msgspec.structs.replace(problem, hint=hint)
    if isinstance(error, ClientDisconnected):
        return _CLIENT_GONE
    if isinstance(error, _UNREADABLE):
        problem = _problem(400, "the request holds a value that cannot be read", instance, request_id)
        return msgspec.structs.replace(problem, hint=_INVALID_HINT)
    return problem_for(
        InternalServerError("an unexpected fault", hint="the server's log has it under this request id"),
        instance=instance,
        request_id=request_id,
    )


def problem_headers(error: BaseException) -> dict[str, str]:
    """Headers that belong to a problem: when to try again, how to say who asks, which methods there are."""
    headers = {}
    after = next((_RETRY_AFTER[cls] for cls in type(error).__mro__ if cls in _RETRY_AFTER), None)
    if after is not None:
        headers["Retry-After"] = str(after)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers:
        headers.update({name.title(): value for name, value in error.headers.items()})
    return headers


def encode_problem(problem: Problem) -> bytes:
    return msgspec.json.encode(problem)


def log_fault(error: BaseException, **fields: object) -> None:
    """Logs a fault: its class and frames. Its message may quote a document, so only the debug log has it."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("fault", error=type(error).__qualname__, frames=frames, **fields)
    _log.debug("fault", message=str(error), **fields)


def _handle(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    request_id = request.scope.get("state", {}).get("request_id", "")
    problem = problem_of(error, instance=request.scope["path"], request_id=request_id)
    if isinstance(error, _UNREADABLE) or (problem.status == 500 and not isinstance(error, MemKVError)):
        log_fault(error, request_id=request_id)
    return Response(
        content=encode_problem(problem),
        status_code=problem.status,
        media_type=PROBLEM_JSON,
        headers=problem_headers(error),
    )


def exception_handlers() -> ExceptionHandlersMap:
    return {Exception: _handle, HTTPException: _handle}


def _problem(
    status: int, detail: str, instance: str, request_id: str, items: list[ProblemItem] | None = None
) -> Problem:
    """A problem that no class of ours stands for, such as an unknown route or method."""
    phrase = HTTPStatus(status).phrase
    cls = error_for("", status)
    if cls.status == status:
        hint = "" if items is None else _INVALID_HINT
        problem = problem_for(cls(detail or phrase, hint=hint), instance=instance, request_id=request_id)
        return msgspec.structs.replace(problem, errors=items or [])
    code = phrase.lower().replace(" ", "_")
    return Problem(
        type=f"urn:memkv:problem:{code}",
        title=phrase.capitalize(),
        status=status,
        detail=detail or phrase,
        code=code,
        instance=instance,
        request_id=request_id,
    )


def _explain(error: HTTPException) -> tuple[str, str]:
    """(detail, hint) of what the framework refuses."""
    if isinstance(error, NotFoundException):
        return "there is no such route", "the routes are listed at /docs"
    if isinstance(error, MethodNotAllowedException):
        allowed = (error.headers or {}).get("allow", "")
        return "this route does not allow the method", f"allowed: {allowed}; the routes are listed at /docs"
    if error.status_code == HTTPStatus.REQUEST_TIMEOUT:
        return _plain(error.detail), "send the body without pauses, or send less at once"
    return _plain(error.detail), "the routes and what they take are described at /docs"


def _items(extra: object) -> list[ProblemItem]:
    """What the framework says of each parameter that it refused."""
    if not isinstance(extra, list):
        return []
    items = []
    for entry in extra:
        if isinstance(entry, dict):
            if entry.get("key") == "data":  # the framework's word for a body that is not there
                return [
                    ProblemItem(message="the body is empty; JSON is expected", loc="body", code="invalid")
                ]
            source = str(getattr(entry.get("source"), "value", entry.get("source", "")))
            loc = ".".join(part for part in (source, str(entry.get("key", ""))) if part)
            items.append(ProblemItem(message=str(entry.get("message", "")), loc=loc, code="invalid"))
    return items


def _plain(detail: str) -> str:
    """The framework's detail without its `400: ` and without the query string, which may quote a document."""
    return detail.removeprefix("400: ").split("?", 1)[0]
