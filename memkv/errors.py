"""Every error that memkv raises on purpose.

    MemKVError
    ├── APIError                        something between a client and a server
    │   ├── APIConnectionError
    │   └── APITimeoutError
    ├── BadRequestError            400
    │   ├── ConfigError
    │   ├── LayoutError
    │   ├── KernelArgumentError
    │   └── FilterError
    ├── AuthenticationError        401
    ├── PermissionDeniedError      403
    ├── NotFoundError              404
    │   ├── CollectionNotFound
    │   ├── DocumentNotFound
    │   ├── ChunkNotFound
    │   ├── JobNotFound
    │   ├── AccessKeyNotFound
    │   └── ModelNotFound
    ├── ConflictError              409
    │   ├── CollectionExists
    │   ├── FingerprintMismatch
    │   └── ReuseUnavailable
    ├── PayloadTooLargeError       413
    │   └── ContextTooLong
    ├── UnsupportedMediaTypeError  415
    ├── UnprocessableDocumentError 422
    │   └── EmptyDocument
    ├── ModelError                 424
    │   ├── UnsupportedModel
    │   └── ModelDamaged
    ├── RateLimitError             429
    ├── InternalServerError        500
    ├── ServiceUnavailableError    503
    │   ├── Overloaded
    │   ├── PoolExhausted
    │   ├── EngineClosed
    │   ├── DatabaseUnavailable
    │   ├── DatabaseDamaged
    │   ├── MigrationNeeded
    │   ├── StoreLocked
    │   ├── StoreFenced
    │   └── ExtensionMissing
    └── InsufficientStorageError   507

An error carries a stable `code`, the HTTP `status` it becomes, and a `hint` that says how to fix it.
The SDK raises the same class that the server raised: `error_for(code, status)` finds it.
"""

from __future__ import annotations

from typing import ClassVar


class MemKVError(Exception):
    """Root of the tree.

    Attributes:
        detail: what happened, in one sentence.
        hint: what to do about it; the `remedy` of the class where the raiser knows nothing more.
        request_id: the server's id of the request, where there was one.
    """

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    remedy: ClassVar[str] = ""  # of a class whose errors are all mended alike; else each raiser gives a hint

    def __init__(self, detail: str, *, hint: str = "", request_id: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint or self.remedy
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.detail} ({self.hint})" if self.hint else self.detail


class APIError(MemKVError):
    code = "api_error"
    status = 502


class APIConnectionError(APIError):
    code = "connection_failed"
    remedy = "see whether the server still runs, and send the request again"


class APITimeoutError(APIError):
    code = "timeout"
    status = 504
    remedy = "allow more time"


class BadRequestError(MemKVError):
    code = "bad_request"
    status = 400


class ConfigError(BadRequestError):
    code = "config_invalid"


class LayoutError(BadRequestError):
    code = "layout_invalid"


class KernelArgumentError(BadRequestError):
    code = "kernel_argument_invalid"


class FilterError(BadRequestError):
    code = "filter_invalid"


class AuthenticationError(MemKVError):
    code = "unauthenticated"
    status = 401


class PermissionDeniedError(MemKVError):
    code = "permission_denied"
    status = 403


class NotFoundError(MemKVError):
    code = "not_found"
    status = 404


class CollectionNotFound(NotFoundError):
    code = "collection_not_found"
    remedy = "memkv collections list shows those that exist"


class DocumentNotFound(NotFoundError):
    code = "document_not_found"
    remedy = "memkv documents list -c COLLECTION shows those that exist"


class ChunkNotFound(NotFoundError):
    """A conversation names a chunk that its collection does not hold, or not any more."""

    code = "chunk_not_found"
    remedy = "leave it out of chunk_ids, or begin a new conversation; a changed document has new chunks"


class JobNotFound(NotFoundError):
    code = "job_not_found"
    remedy = "memkv jobs list shows those that exist"


class AccessKeyNotFound(NotFoundError):
    code = "key_not_found"
    remedy = "memkv keys list shows those that exist"


class ModelNotFound(NotFoundError):
    code = "model_not_found"


class ConflictError(MemKVError):
    code = "conflict"
    status = 409


class CollectionExists(ConflictError):
    code = "collection_exists"


class FingerprintMismatch(ConflictError):
    """The collection's KV was made by another model, tokenizer, prefix, dtype or layout."""

    code = "model_mismatch"


class ReuseUnavailable(ConflictError):
    """`reuse = strict` was asked for and some chunk had no valid KV to map."""

    code = "reuse_unavailable"


class PayloadTooLargeError(MemKVError):
    code = "payload_too_large"
    status = 413


class ContextTooLong(PayloadTooLargeError):
    """The prompt exceeds the model's context or the whole block pool: it can never run."""

    code = "context_too_long"


class UnsupportedMediaTypeError(MemKVError):
    code = "unsupported_media_type"
    status = 415


class UnprocessableDocumentError(MemKVError):
    code = "unprocessable_document"
    status = 422


class EmptyDocument(UnprocessableDocumentError):
    code = "empty_document"


class ModelError(MemKVError):
    code = "model_failed"
    status = 424


class UnsupportedModel(ModelError):
    code = "unsupported_model"
    remedy = "give --model another one; memkv models list shows those that are known to work"


class ModelDamaged(ModelError):
    code = "model_damaged"
    remedy = "copy or install the model again"


class RateLimitError(MemKVError):
    code = "rate_limited"
    status = 429


class InternalServerError(MemKVError):
    code = "internal_error"
    status = 500
    remedy = "this is a fault of memkv: its log, or memkv --debug, shows where"


class ServiceUnavailableError(MemKVError):
    code = "unavailable"
    status = 503


class Overloaded(ServiceUnavailableError):
    """The request waited for blocks until its deadline."""

    code = "overloaded"


class PoolExhausted(ServiceUnavailableError):
    """Fewer blocks are free than were asked for."""

    code = "pool_exhausted"
    remedy = "try again when other questions are answered, or raise engine.pool_bytes"


class EngineClosed(ServiceUnavailableError):
    code = "engine_closed"
    remedy = "it is about to stop: try again when it is started again"


class DatabaseUnavailable(ServiceUnavailableError):
    """The database is locked, busy or not reachable; nothing was written."""

    code = "database_unavailable"


class DatabaseDamaged(ServiceUnavailableError):
    code = "database_damaged"


class MigrationNeeded(ServiceUnavailableError):
    code = "migration_needed"


class StoreLocked(ServiceUnavailableError):
    """Another process holds the store."""

    code = "store_locked"


class StoreFenced(ServiceUnavailableError):
    """Another process took the store over; this one may not write any more."""

    code = "store_fenced"


class ExtensionMissing(ServiceUnavailableError):
    """The compiled kernels are not installed."""

    code = "extension_missing"


class InsufficientStorageError(MemKVError):
    code = "insufficient_storage"
    status = 507


def error_classes() -> dict[str, type[MemKVError]]:
    """Every class of the tree by its `code`."""
    found: dict[str, type[MemKVError]] = {}
    waiting: list[type[MemKVError]] = [MemKVError]
    while waiting:
        cls = waiting.pop()
        found[cls.code] = cls
        waiting.extend(cls.__subclasses__())
    return found


_BY_STATUS: dict[int, type[MemKVError]] = {
    cls.status: cls
    for cls in (
        BadRequestError,
        AuthenticationError,
        PermissionDeniedError,
        NotFoundError,
        ConflictError,
        PayloadTooLargeError,
        UnsupportedMediaTypeError,
        UnprocessableDocumentError,
        ModelError,
        RateLimitError,
        InternalServerError,
        ServiceUnavailableError,
        InsufficientStorageError,
    )
}


def error_for(code: str, status: int) -> type[MemKVError]:
    """The class for a server's `code`; the class of its HTTP `status` where the code is not known here."""
    known = error_classes().get(code)
    if known is not None:
        return known
    return _BY_STATUS.get(status, APIError)
