"""Rows as the replies that clients see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from memkv.errors import MemKVError
from memkv.store import rows
from memkv.store.rows import AccessKeyRow, CollectionRow, DocumentRow, FileState, JobItem, JobRow, Reference
from memkv.store.rows import CollectionCounts as CountsRow
from memkv.store.upkeep import QuarantinedFile as QuarantinedRow
from memkv.store.upkeep import Removed
from memkv.wire import (
    AcceptedDocument,
    AccessKey,
    Collection,
    CollectionCounts,
    Document,
    Exported,
    FailedItem,
    Imported,
    Job,
    JobCounts,
    JobProgress,
    Metadata,
    NewAccessKey,
    Page,
    PageRequest,
    Problem,
    Quarantine,
    QuarantinedFile,
    Snapshot,
    StoreChange,
    StoreFile,
    StoreReference,
    StoreStats,
    StoreVerification,
    problem_for,
)

_MOST_FAILED = 100  # documents of a job, told one by one

R = TypeVar("R")
T = TypeVar("T")


def collection_reply(row: CollectionRow, counts: CountsRow, model: str) -> Collection:
    return Collection(
        id=row.id,
        name=row.name,
        description=row.description,
        metadata=metadata_reply(row.metadata),
        model=model,
        fingerprint=row.fingerprint_digest,
        embedder=row.embedder_name,
        chunk_tokens=row.max_chunk_tokens,
        block_size=row.block_size,
        prefill=row.prefill,
        max_kv_bytes=row.max_kv_bytes,
        system_prompt=row.system_prompt,
        primer=row.primer,
        prefix_tokens=len(row.prefix_ids),
        counts=CollectionCounts(
            documents=counts.documents,
            chunks=counts.chunks,
            tokens=counts.tokens,
            kv_files=counts.kv_files,
        ),
        kv_bytes=counts.kv_bytes,
        by_status={"pending": counts.pending, "ready": counts.ready, "failed": counts.failed},
        created_at=_time(row.created_at),
    )


def document_reply(row: DocumentRow, collection: str) -> Document:
    return Document(
        id=row.id,
        external_id=row.external_id,
        collection=collection,
        title=row.title,
        metadata=metadata_reply(row.metadata),
        status=row.status,
        content_hash=row.content_hash,
        bytes=row.text_bytes,
        chunks=row.num_chunks,
        tokens=row.num_tokens,
        created_at=_time(row.created_at),
        updated_at=_time(row.updated_at),
        error=problem_reply(row.error) if row.error else None,
    )


def accepted_reply(
    accepted: rows.AcceptedDocument, now: DocumentRow | None, notes: Sequence[str]
) -> AcceptedDocument:
    """`now`: the document as its finished job left it."""
    document = now or accepted.document
    return AcceptedDocument(
        id=document.id,
        external_id=document.external_id,
        content_hash=document.content_hash,
        outcome=accepted.outcome,
        status=document.status,
        notes=list(notes),
    )


def job_reply(row: JobRow, collection: str, items: Sequence[JobItem]) -> Job:
    problems = [problem_reply(item.error) for item in items if item.error]
    if row.error:
        problems.append(problem_reply(row.error))
    return Job(
        id=row.id,
        kind=row.kind,
        collection=collection,
        status=row.status,
        progress=JobProgress(stage=row.stage, done=row.done, total=row.total, unit=row.unit),
        counts=msgspec.convert(dict(row.counts), JobCounts),
        errors=problems,
        attempts=row.attempts,
        cancel_requested=row.cancel_requested,
        created_at=_time(row.created_at),
        started_at=_time(row.started_at),
        finished_at=_time(row.finished_at),
        owner=row.owner or "",
        heartbeat_at=_time(row.heartbeat_at),
        failed=[
            FailedItem(document_id=item.document_id, problem=problem_reply(item.error))
            for item in items
            if item.error
        ][:_MOST_FAILED],
        verification=_result(row, "verification", StoreVerification),
        exported=_result(row, "exported", Exported),
        imported=_result(row, "imported", Imported),
        change=_result(row, "change", StoreChange),
        snapshot=_result(row, "snapshot", Snapshot),
    )


def _result(row: JobRow, name: str, kind: type[T]) -> T | None:
    """What a job about the store came to."""
    found = row.counts.get(name)
    return None if found is None else msgspec.convert(found, kind)


def problem_reply(stored: Mapping[str, object]) -> Problem:
    """A problem as it was stored (`stored_problem`), possibly by an older memkv."""
    code = str(stored.get("code", "internal_error"))
    return Problem(
        type=str(stored.get("type", "about:blank")),
        title=str(stored.get("title", code)),
        status=int(str(stored.get("status", 500))),
        detail=str(stored.get("detail", "")),
        code=code,
        hint=str(stored.get("hint", "")),
    )


def stored_problem(error: MemKVError) -> dict[str, object]:
    """A problem as the database keeps it."""
    stored: dict[str, object] = msgspec.to_builtins(problem_for(error))
    return stored


def stats_reply(store: Mapping[str, Any], pool: Mapping[str, int], stale: Sequence[str] | None) -> StoreStats:
    return StoreStats(
        store_id=store["store_id"],
        data_dir=store["data_dir"],
        generation=store["generation"],
        collections=store["collections"],
        documents=sum(store[f"documents_{status}"] for status in ("pending", "ready", "failed")),
        chunks=store["chunks"],
        tokens=store["tokens"],
        kv_files=store["kv_files"],
        kv_bytes=store["kv_bytes"],
        database={name: str(value) for name, value in store["database"].items()},
        warnings=list(store["warnings"]),
        pool=dict(pool),
        counters=dict(store["chunk_store"]),
        stale=None if stale is None else list(stale),
    )


def file_reply(state: FileState) -> StoreFile:
    return StoreFile(
        key=state.file.input_key,
        collection=state.collection,
        tokens=state.file.num_tokens,
        bytes=state.file.num_bytes,
        chunks=state.chunks,
        uses=state.uses,
        created_at=_time(state.created_at),
        used_at=_time(state.used_at),
        verified_at=_time(state.verified_at),
    )


def reference_reply(reference: Reference) -> StoreReference:
    return StoreReference(**asdict(reference))


def quarantine_reply(files: Sequence[QuarantinedRow]) -> Quarantine:
    return Quarantine(
        files=[QuarantinedFile(**asdict(file)) for file in files], bytes=sum(file.bytes for file in files)
    )


def change_reply(change: Removed, *, dry_run: bool) -> StoreChange:
    return StoreChange(
        dry_run=dry_run,
        files=change.files,
        bytes=change.bytes,
        bytes_before=change.bytes_before,
        bytes_after=change.bytes_after,
        failed=change.failed,
    )


def key_reply(row: AccessKeyRow, notes: Sequence[str] = ()) -> AccessKey:
    return AccessKey(**_key_fields(row), notes=list(notes))


def new_key_reply(row: AccessKeyRow, secret: str, notes: Sequence[str]) -> NewAccessKey:
    return NewAccessKey(**_key_fields(row), notes=list(notes), secret=secret)


def _key_fields(row: AccessKeyRow) -> dict[str, Any]:
    expired = row.expires_at is not None and row.expires_at <= datetime.now(UTC)
    return {
        "id": row.id,
        "name": row.name,
        "prefix": row.prefix,
        "scope": row.scope,
        "collections": None if row.collections is None else list(row.collections),
        "status": "revoked" if row.revoked_at else "expired" if expired else "valid",
        "created_at": _time(row.created_at),
        "expires_at": _time(row.expires_at),
        "revoked_at": _time(row.revoked_at),
    }


def page_rows(page: PageRequest) -> rows.PageRequest:
    return rows.PageRequest(
        limit=page.limit, order=page.order, after=page.after or None, before=page.before or None
    )


def page_reply(page: rows.Page[R], convert: Callable[[R], T], id_of: Callable[[T], str]) -> Page[T]:
    data = [convert(row) for row in page.rows]
    return Page(
        data=data,
        has_more=page.has_more,
        first_id=id_of(data[0]) if data else "",
        last_id=id_of(data[-1]) if data else "",
    )


def _time(moment: datetime | None) -> str:
    return "" if moment is None else moment.isoformat(timespec="milliseconds")


def metadata_reply(stored: Mapping[str, Any]) -> Metadata:
    return dict(stored)
