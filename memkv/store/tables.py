"""The tables, the same on SQLite and PostgreSQL.

    store 1                                  epoch fences writers, generation counts write transactions
    tenants 1 ── n collections 1 ── n documents 1 ── n chunks
                                            1 ── n document_values      what filters compare
    tenants 1 ── n kv_files                  one row per file under blocks/, found by input key
    jobs 1 ── n job_items                    history: they outlive what they speak of
    kv_uses                                  how often a key was mapped for a question
    gates                                    what reuse costs, as it was measured
    keys                                     who may ask a server for what

`chunks.input_key` and `collections.prefix_key` refer to `kv_files.input_key` without a constraint: KV may be
missing at any time, it is made again from the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from memkv.errors import DatabaseDamaged
from memkv.kv.fingerprint import decode_tokens, encode_tokens
from memkv.store.plain_values import canonical_json

# SQLite compares text by bytes; so must PostgreSQL, whatever the locale of its cluster.
PlainText = Text().with_variant(Text(collation="C"), "postgresql")
RowId = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows only in an INTEGER column
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def _damaged(what: str, cause: Exception) -> DatabaseDamaged:
    error = DatabaseDamaged(
        f"the database holds {what} that memkv did not write", hint="restore the database from a backup"
    )
    error.__cause__ = cause
    return error


class JSONText(TypeDecorator[Any]):
    """Canonical JSON in a text column."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else canonical_json(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        try:
            return None if value is None else json.loads(value)
        except (ValueError, TypeError, RecursionError) as cause:
            raise _damaged("JSON", cause) from cause


class Tokens(TypeDecorator[tuple[int, ...]]):
    """Token ids as little-endian int32."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Sequence[int] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else encode_tokens(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> tuple[int, ...] | None:
        try:
            return None if value is None else tuple(decode_tokens(value))
        except (ValueError, TypeError) as cause:
            raise _damaged("token ids", cause) from cause


class Moment(TypeDecorator[datetime]):
    """Microseconds since 1970, UTC: the same integer on both databases."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else (value - _EPOCH) // _MICROSECOND

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        try:
            return None if value is None else _EPOCH + value * _MICROSECOND
        except (TypeError, OverflowError) as cause:
            raise _damaged("a time", cause) from cause


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class StoreState(Base):
    """One row. Every write transaction begins by counting `generation` where `epoch` is still its own."""

    __tablename__ = "store"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # always 1
    store_id: Mapped[str] = mapped_column(PlainText)
    epoch: Mapped[int] = mapped_column(BigInteger)
    generation: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(Moment)


class Tenant(Base):
    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(PlainText, primary_key=True)
    secret: Mapped[bytes] = mapped_column(LargeBinary)  # 32 random bytes, the key of every input key
    created_at: Mapped[datetime] = mapped_column(Moment)


class Collection(Base):
    __tablename__ = "collections"
    __table_args__ = (UniqueConstraint("tenant", "name"),)

    id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    tenant: Mapped[str] = mapped_column(PlainText, ForeignKey("tenants.name"))
    name: Mapped[str] = mapped_column(PlainText)
    description: Mapped[str] = mapped_column(PlainText)
    # `metadata` is taken by the declarative base
    metadata_: Mapped[dict[str, Any]] = mapped_column("metadata", JSONText)
    fingerprint_digest: Mapped[str] = mapped_column(PlainText)
    fingerprint_json: Mapped[str] = mapped_column(PlainText)
    embedder_name: Mapped[str] = mapped_column(PlainText)
    embedder_digest: Mapped[str] = mapped_column(PlainText)
    dim: Mapped[int] = mapped_column(Integer)
    max_chunk_tokens: Mapped[int] = mapped_column(Integer)
    block_size: Mapped[int] = mapped_column(Integer)
    prefill: Mapped[str] = mapped_column(PlainText)
    system_prompt: Mapped[str] = mapped_column(PlainText)
    primer: Mapped[bool] = mapped_column(Boolean, server_default=false())
    prefix_ids: Mapped[tuple[int, ...]] = mapped_column(Tokens)
    prefix_key: Mapped[str] = mapped_column(PlainText, index=True)
    generation: Mapped[int] = mapped_column(BigInteger)
    stamp: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(Moment)
    model_name: Mapped[str] = mapped_column(PlainText)  # for people; the fingerprint decides
    max_kv_bytes: Mapped[int] = mapped_column(BigInteger)  # 0: no cap of its own


class Document(Base):
    __tablename__ = "documents"
    __table_args__ = (
        UniqueConstraint("collection_id", "external_id"),
        Index(None, "collection_id", "content_hash"),
        Index(None, "collection_id", "status"),
    )

    id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    tenant: Mapped[str] = mapped_column(PlainText, ForeignKey("tenants.name"))
    collection_id: Mapped[str] = mapped_column(PlainText, ForeignKey("collections.id"))
    external_id: Mapped[str] = mapped_column(PlainText)
    title: Mapped[str] = mapped_column(PlainText)
    filename: Mapped[str] = mapped_column(PlainText)
    media_type: Mapped[str] = mapped_column(PlainText)
    metadata_: Mapped[dict[str, Any]] = mapped_column("metadata", JSONText)
    text: Mapped[str] = mapped_column(PlainText)
    text_bytes: Mapped[int] = mapped_column(BigInteger)
    content_hash: Mapped[str] = mapped_column(PlainText)
    status: Mapped[str] = mapped_column(PlainText)  # pending | ready | failed
    revision: Mapped[int] = mapped_column(BigInteger)
    error: Mapped[dict[str, Any] | None] = mapped_column(JSONText)
    num_chunks: Mapped[int] = mapped_column(Integer)
    num_tokens: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(Moment)
    updated_at: Mapped[datetime] = mapped_column(Moment)


class DocumentValue(Base):
    """One scalar of a document's metadata, kept apart by kind so that comparisons are the same everywhere."""

    __tablename__ = "document_values"
    __table_args__ = (Index(None, "collection_id", "key"),)

    document_id: Mapped[str] = mapped_column(
        PlainText, ForeignKey("documents.id", ondelete="CASCADE"), primary_key=True
    )
    key: Mapped[str] = mapped_column(PlainText, primary_key=True)
    collection_id: Mapped[str] = mapped_column(PlainText)
    kind: Mapped[str] = mapped_column(PlainText)  # string | number | boolean
    string: Mapped[str | None] = mapped_column(PlainText)
    number: Mapped[float | None] = mapped_column(Double)  # booleans are 0 and 1


class Chunk(Base):
    __tablename__ = "chunks"
    __table_args__ = (
        UniqueConstraint("document_id", "ordinal"),
        Index(None, "tenant", "input_key"),
        {"sqlite_autoincrement": True},  # a row id that once stood in an index never comes back
    )

    row_id: Mapped[int] = mapped_column(RowId, primary_key=True)
    id: Mapped[str] = mapped_column(PlainText, unique=True)
    tenant: Mapped[str] = mapped_column(PlainText, ForeignKey("tenants.name"))
    collection_id: Mapped[str] = mapped_column(PlainText, ForeignKey("collections.id"), index=True)
    document_id: Mapped[str] = mapped_column(PlainText, ForeignKey("documents.id"))
    ordinal: Mapped[int] = mapped_column(Integer)
    span_start: Mapped[int] = mapped_column(BigInteger)
    span_end: Mapped[int] = mapped_column(BigInteger)
    text: Mapped[str] = mapped_column(PlainText)
    label: Mapped[str] = mapped_column(PlainText)
    token_ids: Mapped[tuple[int, ...]] = mapped_column(Tokens)
    input_key: Mapped[str] = mapped_column(PlainText)
    embedding: Mapped[bytes] = mapped_column(LargeBinary)  # float32 [dim], little-endian


class KVFile(Base):
    __tablename__ = "kv_files"

    input_key: Mapped[str] = mapped_column(PlainText, primary_key=True)
    tenant: Mapped[str] = mapped_column(PlainText, ForeignKey("tenants.name"))
    fingerprint_digest: Mapped[str] = mapped_column(PlainText)
    file_digest: Mapped[str] = mapped_column(PlainText)
    num_tokens: Mapped[int] = mapped_column(Integer)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(Moment)
    collection_id: Mapped[str] = mapped_column(
        PlainText, index=True
    )  # that it was made for, and counts against
    generation: Mapped[int] = mapped_column(BigInteger)  # the store's when it was published
    verified_at: Mapped[datetime | None] = mapped_column(Moment)  # when every byte was read last


class KVUse(Base):
    __tablename__ = "kv_uses"

    input_key: Mapped[str] = mapped_column(PlainText, primary_key=True)
    tenant: Mapped[str] = mapped_column(PlainText, ForeignKey("tenants.name"))
    uses: Mapped[int] = mapped_column(BigInteger)
    used_at: Mapped[datetime] = mapped_column(Moment)


class Job(Base):
    __tablename__ = "jobs"
    __table_args__ = (Index(None, "status", "sequence"),)

    id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    tenant: Mapped[str] = mapped_column(PlainText, ForeignKey("tenants.name"))
    collection_id: Mapped[str] = mapped_column(PlainText)
    kind: Mapped[str] = mapped_column(PlainText)
    status: Mapped[str] = mapped_column(PlainText)
    sequence: Mapped[int] = mapped_column(BigInteger)  # the store's generation at its birth: orders the queue
    stage: Mapped[str] = mapped_column(PlainText)
    done: Mapped[int] = mapped_column(BigInteger)
    total: Mapped[int] = mapped_column(BigInteger)
    unit: Mapped[str] = mapped_column(PlainText)
    counts: Mapped[dict[str, Any]] = mapped_column(JSONText)
    error: Mapped[dict[str, Any] | None] = mapped_column(JSONText)
    attempts: Mapped[int] = mapped_column(Integer)
    cancel_requested: Mapped[int] = mapped_column(Integer)  # 0 | 1
    lease_epoch: Mapped[int | None] = mapped_column(BigInteger)  # whose epoch runs it; no clock is asked
    lease_owner: Mapped[str | None] = mapped_column(PlainText)
    heartbeat_at: Mapped[datetime | None] = mapped_column(Moment)  # of a running one; for people to read
    arguments: Mapped[dict[str, Any] | None] = mapped_column(JSONText)  # of a kind that takes some
    created_at: Mapped[datetime] = mapped_column(Moment)
    started_at: Mapped[datetime | None] = mapped_column(Moment)
    finished_at: Mapped[datetime | None] = mapped_column(Moment)


class JobDocument(Base):
    __tablename__ = "job_items"

    job_id: Mapped[str] = mapped_column(
        PlainText, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    )
    ordinal: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    document_id: Mapped[str] = mapped_column(PlainText, index=True)
    status: Mapped[str] = mapped_column(PlainText)  # queued | running | succeeded | failed
    error: Mapped[dict[str, Any] | None] = mapped_column(JSONText)


class Gate(Base):
    __tablename__ = "gates"

    fingerprint_digest: Mapped[str] = mapped_column(PlainText, primary_key=True)
    data: Mapped[str] = mapped_column(PlainText, primary_key=True)  # what was asked
    chunk_tokens: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # at most
    length: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(PlainText, primary_key=True)  # of tasks
    policy: Mapped[str] = mapped_column(PlainText, primary_key=True)
    questions: Mapped[int] = mapped_column(Integer)
    fresh: Mapped[float] = mapped_column(Double)
    dnll_high: Mapped[float] = mapped_column(Double)
    accuracy_full: Mapped[float] = mapped_column(Double)
    measured_at: Mapped[datetime] = mapped_column(Moment)


class AccessKey(Base):
    """No row is ever removed: whether there is one decides whether a server wants keys."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    name: Mapped[str] = mapped_column(PlainText)
    prefix: Mapped[str] = mapped_column(PlainText)
    digest: Mapped[str] = mapped_column(PlainText, unique=True)  # SHA-256 of the secret, 64 hex digits
    scope: Mapped[str] = mapped_column(PlainText)  # read | write | admin
    collections: Mapped[list[str] | None] = mapped_column(JSONText)  # names; None: every collection
    created_at: Mapped[datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime | None] = mapped_column(Moment)
    revoked_at: Mapped[datetime | None] = mapped_column(Moment)
