"""Requests from bytes or from Python values, held to their types and to what types cannot say.

JSON nests at most 64 deep, integers stay within what a double holds exactly (2^53), numbers are finite, and
no string holds NUL or a lone surrogate: a database or another JSON parser would refuse or change them. The
text of a document is the exception: `memkv.text` has its own rules for it and says what it did.
"""

from __future__ import annotations

import math
import re
from typing import TypeVar

import msgspec

from memkv.wire import QueryRequest, Request

R = TypeVar("R", bound=Request)

MAX_DEPTH = 64
MAX_INTEGER = 2**53

_AT = re.compile(r"^(?P<message>.*?)(?: - at `\$\.?(?P<loc>.*)`)?$", re.DOTALL)
_PLAINER = {
    "Input data was truncated": "JSON ends too early, or holds a lone surrogate (\\ud800 to \\udfff)",
    "Invalid UTF-8 encoded string": "JSON is not UTF-8",
    "Expected `str` of length >= 1": "must not be empty",
}
_NAME_HINT = "a name is 1 to 128 letters, digits, '.', '_' or '-', with a letter or digit first"
_FREE_FIELDS = frozenset({"text", "data"})  # a document's own text and bytes


class Violation(ValueError):
    """A request that breaks a rule.

    Attributes:
        loc: where, as a dotted path; empty for the whole.
        message: the rule that it breaks.
        hint: how to keep to it, where the rule itself does not say so.
    """

    def __init__(self, message: str, loc: str = "", hint: str = "") -> None:
        super().__init__(f"{loc}: {message}" if loc else message)
        self.message = message
        self.loc = loc
        self.hint = hint


def decode_request(body: bytes, kind: type[R]) -> R:
    """A request from JSON bytes; raises `Violation`."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise _violation(error) from error
    except RecursionError as error:
        raise Violation(f"JSON nests more than {MAX_DEPTH} deep") from error
    check_values(request)
    return request


def validate_request(request: R) -> R:
    """The same request, held to the constraints of its type, which a constructor does not check."""
    try:
        plain = msgspec.to_builtins(request, builtin_types=(bytes,))
        checked = msgspec.convert(plain, type(request), builtin_types=(bytes,))
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _violation(error) from error
    except RecursionError as error:
        raise Violation(f"values nest more than {MAX_DEPTH} deep") from error
    check_values(checked)
    return checked


def check_values(request: Request) -> None:
    """Raises `Violation` for the first value that breaks a rule of this module."""
    for name in request.__struct_fields__:
        if name not in _FREE_FIELDS:
            _check(getattr(request, name), name, depth=1)
    if isinstance(request, QueryRequest):
        _check_conversation(request)


def check_string(text: str, loc: str) -> None:
    """Raises `Violation` for NUL and lone surrogates."""
    if "\0" in text:
        raise Violation("NUL characters are not allowed", loc, "remove them")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise Violation("lone surrogates are not allowed", loc, "send valid Unicode")


def _check_conversation(request: QueryRequest) -> None:
    """Raises `Violation` unless there is one question, at the end of turns that are complete."""
    messages = request.messages
    if request.query and messages:
        raise Violation("query and messages exclude each other", "query", "put the question last in messages")
    if not request.query and not messages:
        raise Violation("the question is empty", "query", "ask something")
    for index, message in enumerate(messages):
        role = "assistant" if index % 2 else "user"
        if message.role != role:
            raise Violation(
                f"a message of the {role} has to stand here",
                f"messages[{index}].role",
                "questions of the user and answers of the assistant alternate, from the first question on",
            )
        if message.chunk_ids and (index % 2 or index == len(messages) - 1):
            raise Violation(
                "only questions that were answered have chunks",
                f"messages[{index}].chunk_ids",
                "give the ids of an answer's chunks with the question that it answers",
            )
    if messages and len(messages) % 2 == 0:
        raise Violation("the last message is an answer", "messages", "end with the question to be answered")


def _check(value: object, loc: str, *, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise Violation(f"JSON nests more than {MAX_DEPTH} deep", loc.split(".")[0])
    if isinstance(value, str):
        check_string(value, loc)
    elif isinstance(value, float) and not math.isfinite(value):
        raise Violation("numbers must be finite", loc)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_string(key, f"{loc} (a key)")
            _check_item(item, f"{loc}.{key}", depth=depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_item(item, f"{loc}[{index}]", depth=depth + 1)
    elif isinstance(value, Request):
        for name in value.__struct_fields__:
            _check(getattr(value, name), f"{loc}.{name}", depth=depth + 1)


def _check_item(value: object, loc: str, *, depth: int) -> None:
    """Values inside free-form objects: their integers have no bounds of their own."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise Violation("integers must lie within -2^53 and 2^53", loc, "send it as a string")
    _check(value, loc, depth=depth)


def _violation(error: Exception) -> Violation:
    # msgspec reports a lone surrogate at the end of a short body as truncation.
    match = _AT.match(str(error))
    assert match is not None, "bug: the pattern matches every string"
    hint = _NAME_HINT if "matching regex" in match["message"] else ""
    return Violation(_PLAINER.get(match["message"], match["message"]), match["loc"] or "", hint)
