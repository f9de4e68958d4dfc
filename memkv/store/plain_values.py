"""What may reach SQL, so that SQLite and PostgreSQL accept, store and return the same values.

PostgreSQL refuses NUL in text, SQLite stores it; SQLite's driver overflows on an integer of 2^63; neither
encodes a lone surrogate. All are refused here, before a statement is made.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from memkv.errors import BadRequestError, FilterError

MAX_INTEGER = 2**53  # what JSON readers, float columns and every client keep exactly
MAX_METADATA_BYTES = 65_536
MAX_METADATA_DEPTH = 8
MAX_KEY_CHARS = 256

_NAME = re.compile(r"^\w[\w.\-]{0,127}\Z")

Scalar = str | bool | int | float


def checked_text(
    what: str, value: str, *, max_chars: int, error: type[BadRequestError] = BadRequestError
) -> str:
    """`value`, if both databases can hold it. Raises `error` otherwise."""
    if not isinstance(value, str):
        raise error(f"{what} is not a string", hint="send a string")
    if len(value) > max_chars:
        raise error(f"{what} has {len(value)} characters", hint=f"at most {max_chars}")
    if "\0" in value:
        raise error(f"{what} contains a NUL character", hint="remove it")
    try:
        value.encode()
    except UnicodeEncodeError as cause:
        raise error(f"{what} contains a lone surrogate", hint="send valid Unicode") from cause
    return value


def checked_name(what: str, value: str) -> str:
    """A name that may stand in a URL path: letters, digits, `_ . -`, at most 128 characters."""
    checked_text(what, value, max_chars=128)
    if not _NAME.match(value):
        raise BadRequestError(
            f"{what} {value!r} is not possible",
            hint="1 to 128 letters, digits, '_', '.' or '-', and not '.' or '-' first",
        )
    return value


def checked_scalar(what: str, value: object, *, error: type[BadRequestError] = FilterError) -> Scalar:
    """A string, boolean or number that both databases compare alike. Raises `error` otherwise."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return checked_text(what, value, max_chars=MAX_METADATA_BYTES, error=error)
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise error(f"{what} is beyond 2^53", hint="send it as a string")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise error(f"{what} is not a finite number", hint="send a finite number, or a string")
        return value
    raise error(f"{what} is neither a string, a number nor a boolean", hint="send one of these")


def checked_metadata(what: str, value: Mapping[str, object]) -> dict[str, object]:
    """`value` with its keys sorted, if it is plain JSON. Raises `BadRequestError` otherwise."""
    if not isinstance(value, Mapping):
        raise BadRequestError(f"{what} is not an object", hint='send one, such as {"lang": "en"}')
    checked = _checked_tree(what, value, depth=0)
    assert isinstance(checked, dict)
    size = len(canonical_json(checked).encode())
    if size > MAX_METADATA_BYTES:
        raise BadRequestError(f"{what} takes {size} bytes", hint=f"at most {MAX_METADATA_BYTES}")
    return checked


def canonical_json(value: object) -> str:
    """Equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _checked_tree(what: str, value: object, *, depth: int) -> object:
    if depth > MAX_METADATA_DEPTH:
        raise BadRequestError(f"{what} is nested too deeply", hint=f"at most {MAX_METADATA_DEPTH} levels")
    if value is None:
        return None
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise BadRequestError(f"{what} has a key that is not a string", hint="send it as a string")
        for key in value:
            checked_text(f"a key of {what}", key, max_chars=MAX_KEY_CHARS)
        return {key: _checked_tree(f"{what}.{key}", value[key], depth=depth + 1) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_checked_tree(what, part, depth=depth + 1) for part in value]
    return checked_scalar(what, value, error=BadRequestError)
