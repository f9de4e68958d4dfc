"""Request bodies: which content types are read, and JSON held to `memkv.validation`."""

from __future__ import annotations

from typing import Any, TypeVar

from litestar import Request

from memkv.errors import UnsupportedMediaTypeError
from memkv.validation import Violation, decode_request
from memkv.wire import Request as WireRequest

R = TypeVar("R", bound=WireRequest)

MULTIPART = "multipart/form-data"


class StrictRequest(Request[Any, Any, Any]):
    """A request whose JSON is decoded straight into the handler's struct, without coercion of types."""

    async def json(self) -> Any:
        field = self.route_handler.parsed_data_field
        assert field is not None, "bug: only handlers with a body decode one"
        return await read_json(self, field.annotation)


async def read_json(request: Request[Any, Any, Any], kind: type[R]) -> R:
    """The body as a request struct.

    Raises:
        UnsupportedMediaTypeError: the content type is not JSON. This also keeps forms of foreign web pages
            out, which a browser sends without asking the server first.
        Violation: the body is not JSON or breaks a rule.
    """
    media_type = request.content_type[0]
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError(
            f"the content type is {media_type[:64] or 'not given'}",
            hint="send Content-Type: application/json",
        )
    body = await request.body()
    if not body:
        raise Violation("the body is empty; JSON is expected", "body")
    return decode_request(body, kind)
