"""Documents from a request: one as JSON text, or files as multipart form data.

Form fields: `file` (one or more), and per file, in the same order, `external_id` and `title`; `metadata` is
one JSON object for all files or one per file.
"""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import msgspec
from litestar import Request
from litestar.datastructures import UploadFile
from litestar.exceptions import HTTPException
from memkv.api.body import MULTIPART, read_json

from memkv.errors import UnsupportedMediaTypeError
from memkv.validation import Violation, check_string, validate_request
from memkv.wire import DocumentCreate, DocumentUpload, Metadata

_FIELDS = ("file", "external_id", "title", "metadata")


async def read_documents(request: Request[Any, Any, Any]) -> list[DocumentCreate | DocumentUpload]:
    """What the request's body asks to be ingested, at least one document.

    Raises:
        Violation: a field that is unknown, missing or breaks a rule.
        UnsupportedMediaTypeError: the body is neither JSON nor a multipart form.
    """
    media_type = request.content_type[0]
    if media_type == MULTIPART:
        return list(await _read_form(request))
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError(
            f"the content type is {media_type[:64] or 'not given'}",
            hint=f"send JSON with a text as application/json, or files as {MULTIPART}",
        )
    return [await read_json(request, DocumentCreate)]


async def _read_form(request: Request[Any, Any, Any]) -> list[DocumentUpload]:
    try:
        form = await request.form()
    except (LookupError, UnicodeError, ValueError) as error:
        raise Violation("the form cannot be read", "body") from error
    except HTTPException as error:
        raise Violation(error.detail, "body") from error
    fields: dict[str, list[Any]] = {name: [] for name in _FIELDS}
    for name, value in form.multi_items():
        if name not in fields:
            raise Violation(f"unknown form field; there are {', '.join(_FIELDS)}", str(name)[:64])
        fields[name].append(value)
    files = [_require_file(value) for value in fields["file"]]
    if not files:
        raise Violation("a file is missing", "file")
    external_ids = _one_per_file("external_id", fields["external_id"], len(files))
    titles = _one_per_file("title", fields["title"], len(files))
    metadata = [_parse_metadata(value) for value in _require_text("metadata", fields["metadata"])]
    if len(metadata) not in (0, 1, len(files)):
        raise Violation("give it once, or once for each file", "metadata")
    uploads = []
    for index, file in enumerate(files):
        upload = DocumentUpload(
            data=await file.read(),
            filename=_base_name(file.filename),
            media_type=file.content_type.partition(";")[0].strip().lower()[:128],
            title=titles[index] or "",
            external_id=external_ids[index],
            metadata=metadata[index % len(metadata)] if metadata else {},
        )
        uploads.append(validate_request(upload))
    return uploads


def _require_file(value: object) -> UploadFile:
    if not isinstance(value, UploadFile):
        raise Violation("must be a file with a name", "file")
    return value


def _require_text(name: str, values: list[Any]) -> list[str]:
    for value in values:
        if not isinstance(value, str):
            raise Violation("must be text, not a file", name)
        check_string(value, name)
    return values


def _one_per_file(name: str, values: list[Any], count: int) -> list[str | None]:
    texts = _require_text(name, values)
    if not texts:
        return [None] * count
    if len(texts) != count:
        raise Violation(f"give it once for each of the {count} files, or not at all", name)
    return [text or None for text in texts]


def _parse_metadata(text: str) -> Metadata:
    try:
        return msgspec.json.decode(text, type=Metadata)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Violation("must be a JSON object of strings, numbers, booleans and null", "metadata") from error


def _base_name(filename: str) -> str:
    """The last part of a file's name, as any system writes paths; it is never used as a path here."""
    name = PurePosixPath(PureWindowsPath(filename).as_posix()).name
    check_string(name, "file name")
    return name[:255]
