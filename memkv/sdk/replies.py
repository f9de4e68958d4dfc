"""What comes back, without IO: typed replies, the server's own errors, and when to try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from memkv.errors import APIConnectionError, APIError, MemKVError, error_for
from memkv.sdk.call import Call
from memkv.wire import Problem, QueryEvent

T = TypeVar("T")

RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504})

_FIRST_DELAY = 0.5
_LONGEST_DELAY = 8.0
_LONGEST_RETRY_AFTER = 60.0


def decode_reply(call: Call[T], status: int, headers: Mapping[str, str], content: bytes) -> T:
    """The typed reply.

    Raises:
        MemKVError: the class that the server raised.
        APIError: the answer is none of a memkv server.
    """
    if not 200 <= status < 300 and status not in call.statuses:
        raise error_of(status, headers, content)
    if call.reply is None:
        return None  # type: ignore[return-value]  # the calls without a body are of type None
    try:
        return msgspec.json.decode(content, type=call.reply)
    except msgspec.MsgspecError as error:
        if status in call.statuses:
            raise error_of(status, headers, content) from error
        raise APIError(
            f"{call.method} {call.path} was answered with {status}, but not by memkv's JSON: {error}",
            hint="is this the address of a memkv server, and of the same version?",
        ) from error


def error_of(status: int, headers: Mapping[str, str], content: bytes) -> MemKVError:
    """The error that an answer stands for."""
    request_id = headers.get("x-request-id", "")
    try:
        problem = msgspec.json.decode(content, type=Problem)
    except msgspec.MsgspecError:
        shown = content[:200].decode("utf-8", "replace").strip()
        return error_for("", status)(f"the server answered {status}: {shown}", request_id=request_id)
    return error_of_problem(problem, request_id)


def error_of_problem(problem: Problem, request_id: str = "") -> MemKVError:
    """The server's error, as the class that it raised."""
    cls = error_for(problem.code, problem.status)
    return cls(problem.detail, hint=problem.hint, request_id=problem.request_id or request_id)


def decode_event(kind: str, data: str) -> QueryEvent | None:
    """An event of a stream; None for a kind that this version does not know."""
    try:
        return msgspec.json.decode(data, type=QueryEvent)
    except msgspec.ValidationError:
        return None
    except msgspec.MsgspecError as error:
        raise APIConnectionError(f"the stream broke inside an event ({kind})") from error


class Attempts:
    """Decides after each attempt of a call whether, and when, there is another.

    Only calls that may be sent twice are; the pause doubles from 0.5 s to 8 s and is at least what the
    server's `Retry-After` says, unless that is more than a minute away.
    """

    def __init__(self, call: Call[Any], max_retries: int) -> None:
        self._call = call
        self._left = max_retries if call.repeatable else 0
        self._delay = _FIRST_DELAY

    def after_failure(self) -> float | None:
        """Seconds to wait when no answer came; None: give up."""
        if self._left <= 0:
            return None
        self._left -= 1
        delay, self._delay = self._delay, min(self._delay * 2, _LONGEST_DELAY)
        return delay

    def after_answer(self, status: int, headers: Mapping[str, str]) -> float | None:
        """Seconds to wait before asking again; None: this answer stands."""
        if status not in RETRIED_STATUSES or status in self._call.statuses:
            return None
        given = headers.get("retry-after", "")
        after = float(given[:9]) if given.isascii() and given.isdigit() else 0.0
        if after > _LONGEST_RETRY_AFTER:
            return None
        delay = self.after_failure()
        return None if delay is None else max(delay, after)
