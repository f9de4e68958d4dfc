"""One request of the SDK, without IO, and the parts that requests are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from memkv.errors import BadRequestError
from memkv.wire import DocumentUpload, Page, PageRequest, Request

if TYPE_CHECKING:
    from memkv.memory import Memory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request.

    Attributes:
        reply: the type of the answer's body; None where there is no body.
        local: the same request to a memory in this process.
        repeatable: sending it twice does what sending it once does, so that it may be retried.
        statuses: besides 2xx, those whose body is a reply and not a problem.
    """

    method: str
    path: str
    reply: type[T] | None
    local: Callable[[Memory], T]
    params: Mapping[str, str] = field(default_factory=dict)
    body: Request | None = None
    uploads: Sequence[DocumentUpload] = ()
    repeatable: bool = True
    statuses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A list that is read page by page."""

    page: PageRequest
    call_for: Callable[[PageRequest], Call[Page[T]]]

    @property
    def call(self) -> Call[Page[T]]:
        return self.call_for(self.page)

    def after(self, read: Page[T]) -> Listing[T]:
        """The listing that goes on where `read` ends."""
        backwards = bool(self.page.before)
        cursor = {"before": read.first_id} if backwards else {"after": read.last_id}
        page = PageRequest(limit=self.page.limit, order=self.page.order, **cursor)
        return Listing(page, self.call_for)


def document_path(collection: str, document: str) -> str:
    """Raises `BadRequestError` for a document that no path can name."""
    if not document:
        raise BadRequestError("the document's id is empty", hint="give its id or external id")
    return f"{collection_path(collection)}/documents/{segment(document)}"


def collection_path(name: str) -> str:
    if not name:
        raise BadRequestError("the collection's name is empty", hint="give its name")
    return f"/v1/collections/{segment(name)}"


def segment(text: str) -> str:
    """One segment of a path, whatever the text: `.` and `..` would otherwise lead to another path."""
    try:
        quoted = quote(text, safe="")
    except UnicodeEncodeError as error:
        raise BadRequestError("an id holds a lone surrogate", hint="give valid Unicode") from error
    return quoted.replace(".", "%2E") if not text.strip(".") else quoted


def page_params(page: PageRequest, **more: str) -> dict[str, str]:
    params = {
        "limit": str(page.limit),
        "order": page.order,
        "after": page.after,
        "before": page.before,
        **more,
    }
    return {name: value for name, value in params.items() if value}


def wait_params(wait: float) -> dict[str, str]:
    return {"wait": f"{wait:g}"} if wait > 0 else {}


def json_param(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode("utf-8")
    except (TypeError, msgspec.MsgspecError, RecursionError) as error:
        raise BadRequestError("the filter is no JSON object", hint='such as {"lang": "en"}') from error
