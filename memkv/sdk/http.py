"""What both HTTP clients share: where the server is, how a call is put into HTTP, what its failures mean."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec

from memkv import __version__
from memkv.errors import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    BadRequestError,
    ConfigError,
    UnprocessableDocumentError,
)
from memkv.loopback import is_loopback
from memkv.sdk.call import Call
from memkv.wire import DocumentUpload

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT = 600.0
CONNECT_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is and how to speak to it."""

    base_url: str
    api_key: str = field(repr=False)
    timeout: float
    max_retries: int

    @classmethod
    def of(
        cls, base_url: str | None, api_key: str | None, timeout: float | None, max_retries: int
    ) -> Endpoint:
        """Arguments, then the environment, then defaults. Raises `ConfigError`."""
        url = base_url or os.environ.get("MEMKV_URL") or DEFAULT_URL
        try:
            parsed = httpx2.URL(url)
        except (httpx2.InvalidURL, TypeError) as error:
            raise ConfigError(f"{url!r} is no URL: {error}", hint=f"such as {DEFAULT_URL}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is no http address", hint=f"such as {DEFAULT_URL}")
        key = api_key if api_key is not None else os.environ.get("MEMKV_API_KEY", "")
        if not key.isascii() or not key.isprintable():
            raise ConfigError(
                "the API key holds characters that no header can carry",
                hint="it is ASCII and one line: take away what ends the line, as of a file it was read from",
            )
        return cls(
            base_url=url.rstrip("/"),
            api_key=key,
            timeout=timeout if timeout is not None else _timeout_of(os.environ.get("MEMKV_TIMEOUT", "")),
            max_retries=max_retries,
        )

    def client_arguments(self) -> dict[str, Any]:
        """For `httpx2.Client` and `httpx2.AsyncClient`."""
        headers = {"User-Agent": f"memkv-python/{__version__}"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        url = httpx2.URL(self.base_url)
        arguments: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": headers,
            "timeout": httpx2.Timeout(self.timeout, connect=min(self.timeout, CONNECT_TIMEOUT)),
            # A proxy from the environment is not asked for a server on this machine.
            "trust_env": not is_loopback(url.host),
        }
        if url.scheme == "http":
            # Without TLS no certificates are needed, and reading them takes 0.15 s; this context trusts none.
            arguments["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return arguments


def request_arguments(call: Call[Any], *, stream: bool = False) -> dict[str, Any]:
    """For `build_request` of either client."""
    arguments: dict[str, Any] = {
        "method": call.method,
        "url": call.path,
        "params": dict(call.params),
        "headers": {"Accept": "text/event-stream" if stream else "application/json"},
    }
    if call.body is not None:
        arguments["content"] = _encode(call.body)
        arguments["headers"]["Content-Type"] = "application/json"
    if call.uploads:
        arguments["files"], arguments["data"] = _form(call.uploads)
    return arguments


def failure(error: httpx2.HTTPError, endpoint: Endpoint) -> APIError:
    """The error of ours that a failed exchange stands for."""
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return APIConnectionError(
            f"no server answers at {endpoint.base_url}",
            hint="start one with `memkv serve`, or set MEMKV_URL to where it is",
        )
    if isinstance(error, httpx2.TimeoutException):
        return APITimeoutError(
            f"{endpoint.base_url} gave no answer within {endpoint.timeout:g} s",
            hint="raise timeout or MEMKV_TIMEOUT",
        )
    return APIConnectionError(f"the connection to {endpoint.base_url} broke: {error or type(error).__name__}")


def _encode(body: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise UnprocessableDocumentError(
            "the text holds a lone surrogate", hint="it was not decoded as the text that it is"
        ) from error
    except (TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise BadRequestError(
            f"the request cannot be written as JSON: {error}",
            hint="metadata and filters hold strings, finite numbers, booleans and None",
        ) from error


def _form(uploads: Sequence[DocumentUpload]) -> tuple[list[tuple[str, Any]], dict[str, list[str]]]:
    """The files, and for each field one value per file, in the same order."""
    files = [
        ("file", (upload.filename, upload.data, upload.media_type or "application/octet-stream"))
        for upload in uploads
    ]
    fields = {
        "title": [upload.title for upload in uploads],
        "external_id": [upload.external_id or "" for upload in uploads],
    }
    if any(upload.metadata for upload in uploads):
        fields["metadata"] = [msgspec.json.encode(upload.metadata).decode("utf-8") for upload in uploads]
    return files, {name: values for name, values in fields.items() if any(values)}


def _timeout_of(text: str) -> float:
    if not text:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"MEMKV_TIMEOUT = {text!r} is no number of seconds", hint="such as 600")
    return seconds
