"""Requests that were not read from JSON, held to the same rules as those that were."""

from __future__ import annotations

from memkv.errors import BadRequestError
from memkv.validation import Violation, validate_request
from memkv.wire import Request


def require_valid(request: Request) -> None:
    """Raises `BadRequestError`."""
    try:
        validate_request(request)
    except Violation as error:
        hint = error.hint or "a server describes every field and its limits at /docs"
        raise BadRequestError(str(error), hint=hint) from error
