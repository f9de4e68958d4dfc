"""Path and query parameters, each with the rule that it is held to."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from litestar import Request
from litestar.exceptions import NotFoundException
from litestar.params import PathParameter, QueryParameter

from memkv.validation import Violation, check_string, check_values
from memkv.wire import (
    ARCHIVE_PATTERN,
    NAME_PATTERN,
    DocumentStatus,
    Filter,
    JobStatus,
    PageRequest,
    SearchRequest,
)

_ID_PATTERN = r"^[A-Za-z0-9_-]{1,128}$(?!\n)"
_CURSOR_PATTERN = r"^[A-Za-z0-9_-]{0,128}$(?!\n)"
_DOCUMENT_PATH = re.compile(r"(?:/+[^/]+){2}/+([^/]+)/+[^/]+/(.*)", re.DOTALL)  # its collection; its key

CollectionName = Annotated[str, PathParameter(pattern=NAME_PATTERN, description="Name of the collection")]
KeyId = Annotated[str, PathParameter(pattern=_ID_PATTERN, description="Id of the key")]
Force = Annotated[bool, QueryParameter(description="Although no valid key of scope admin would be left")]
JobId = Annotated[str, PathParameter(pattern=_ID_PATTERN, description="Id of the job")]
# Of type `path`, since an external id may hold slashes; read through `document_key`, which undoes escapes.
DocumentPath = Annotated[
    str, PathParameter(description="Id of the document, or its external id (percent-encoded)")
]

Limit = Annotated[int, QueryParameter(ge=1, le=100, description="Entries of one page")]
Order = Annotated[Literal["asc", "desc"], QueryParameter(description="By time of creation")]
After = Annotated[
    str, QueryParameter(pattern=_CURSOR_PATTERN, description="Id of the entry that the page begins after")
]
Before = Annotated[
    str, QueryParameter(pattern=_CURSOR_PATTERN, description="Id of the entry that the page ends before")
]
Wait = Annotated[
    float | None,
    QueryParameter(
        ge=0,
        schema_extra={"minimum": 0},  # the framework leaves it out of a union
        description="Seconds to wait for the job; at most 300. `Prefer: wait=30` says the same",
    ),
]
DocumentStatusFilter = Annotated[
    DocumentStatus | None, QueryParameter(description="Only documents in this state")
]
JobStatusFilter = Annotated[JobStatus | None, QueryParameter(description="Only jobs in this state")]
JobKindFilter = Annotated[
    str | None, QueryParameter(pattern=r"^[a-z_]{1,64}$(?!\n)", description="Only jobs of this kind")
]
CollectionFilter = Annotated[
    str | None, QueryParameter(pattern=NAME_PATTERN, description="Only jobs of this collection")
]
SnapshotId = Annotated[str, PathParameter(pattern=_ID_PATTERN, description="Id of the snapshot")]
ArchivePath = Annotated[str, PathParameter(pattern=ARCHIVE_PATTERN, description="Name of the archive")]
FileKey = Annotated[
    str,
    PathParameter(
        pattern=r"^[0-9a-f]{8,64}$(?!\n)",
        description="Key of the chunk, or eight of its first digits or more",
    ),
]
FilesOfCollection = Annotated[
    str | None, QueryParameter(pattern=NAME_PATTERN, description="Only files made for this collection")
]
UnusedOnly = Annotated[bool, QueryParameter(description="Only files that nothing refers to")]
FilterText = Annotated[
    str | None,
    QueryParameter(
        max_length=16_384,
        description='Metadata filter as JSON: {"type": "eq", "key": "lang", "value": "en"} or {"lang": "en"}',
    ),
]


def page_request(limit: int, order: Literal["asc", "desc"], after: str, before: str) -> PageRequest:
    """Raises `Violation` for a page that begins and ends at once."""
    if after and before:
        raise Violation("give `after` or `before`, not both", "query.after")
    return PageRequest(limit=limit, order=order, after=after, before=before)


def finite(seconds: float | None) -> float | None:
    """The number, unless it is not one: a query string may say `nan`."""
    if seconds is not None and not math.isfinite(seconds):
        raise Violation("must be a finite number", "query.wait")
    return seconds


def parse_filter(text: str | None) -> Filter | None:
    """A metadata filter from its JSON."""
    if text is None or not text.strip():
        return None
    try:
        parsed = msgspec.json.decode(text, type=Filter)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise Violation("must be a JSON object", "query.filter") from error
    check_values(SearchRequest(query="-", collection="-", filter=parsed))
    return parsed


def document_key(request: Request[Any, Any, Any]) -> str:
    """The document's id or external id: the rest of the path after `/documents/`, its escapes undone once.

    Raises `NotFoundException` where an escaped slash stands for one between the parts of the route.
    """
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode("utf-8")
    found = _DOCUMENT_PATH.fullmatch(raw.decode("ascii", "replace"))
    if found is None or unquote(found[1]) != request.path_params["collection"]:
        raise NotFoundException
    try:
        key = unquote(found[2], errors="strict")
    except UnicodeDecodeError as error:
        raise Violation("is not UTF-8", "path.document") from error
    check_string(key, "path.document")
    if not 1 <= len(key) <= 512:
        raise Violation("must have 1 to 512 characters", "path.document")
    return key
