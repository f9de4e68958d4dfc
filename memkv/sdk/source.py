"""Where a document comes from: a text, bytes, an open file or a path."""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path
from typing import IO

from memkv.errors import BadRequestError
from memkv.wire import DocumentCreate, DocumentUpload, Metadata

File = bytes | IO[bytes] | tuple[str, bytes | IO[bytes]]  # a pair begins with the file's name


def read_document(
    *,
    text: str | None = None,
    file: File | None = None,
    path: str | Path | None = None,
    external_id: str | None = None,
    metadata: Metadata | None = None,
    title: str = "",
) -> DocumentCreate | DocumentUpload:
    """One document from a text, an open file or a path.

    Raises:
        BadRequestError: not exactly one of the three is given, or the file cannot be read.
    """
    if (text is not None) + (file is not None) + (path is not None) != 1:
        raise BadRequestError("not exactly one of text, file and path is given", hint="give one of them")
    if text is not None:
        return DocumentCreate(text=text, title=title, external_id=external_id, metadata=metadata or {})
    name, data = _read_file(file) if file is not None else _read_path(Path(path or ""))
    return DocumentUpload(
        data=data,
        filename=name,
        media_type=_media_type(name),
        title=title,
        external_id=external_id,
        metadata=metadata or {},
    )


def _read_file(file: File) -> tuple[str, bytes]:
    name, content = file if isinstance(file, tuple) else (getattr(file, "name", ""), file)
    data = content if isinstance(content, bytes) else content.read()
    if not isinstance(data, bytes):
        raise BadRequestError("the file is open as text", hint='open it with "rb"')
    if not isinstance(name, str) or not Path(name).name:
        # A name is a document's key where no external id is given: two nameless files are not the same.
        name = f"{hashlib.sha256(data).hexdigest()[:32]}.txt"
    return Path(name).name, data


def _read_path(path: Path) -> tuple[str, bytes]:
    try:
        return path.name, path.read_bytes()
    except OSError as error:
        raise BadRequestError(
            f"cannot read {path}: {error.strerror}", hint="check the path and its rights"
        ) from error


def _media_type(name: str) -> str:
    if name.lower().endswith((".md", ".markdown")):
        return "text/markdown"
    return mimetypes.guess_type(name)[0] or "application/octet-stream"
