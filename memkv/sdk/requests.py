"""Requests of the SDK, without IO: what each says over HTTP, and which method of a `Memory` it stands for.

Those that ask something are in `questions`.

A client sends a `Call` through its transport: an HTTP client, blocking or not, or a memory in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from memkv.sdk.call import (
    Call,
    Listing,
    collection_path,
    document_path,
    json_param,
    page_params,
    segment,
    wait_params,
)
from memkv.wire import (
    Accepted,
    Collection,
    CollectionCreate,
    CollectionPatch,
    CollectionPut,
    Document,
    DocumentCreate,
    DocumentStatus,
    DocumentUpload,
    Estimate,
    Filter,
    Info,
    Job,
    JobStatus,
    Metadata,
    Page,
    PageRequest,
    Prefill,
    Readiness,
)

if TYPE_CHECKING:
    from memkv.memory import Memory

Order = Literal["asc", "desc"]


# Service


def info() -> Call[Info]:
    """What the server runs: version, model, embedder, limits."""
    return Call(method="GET", path="/v1/info", reply=Info, local=lambda memory: memory.info())


def ready() -> Call[Readiness]:
    """Whether the server can answer, and what stands in the way."""
    return Call(
        method="GET", path="/readyz", reply=Readiness, local=lambda memory: memory.ready(), statuses=(503,)
    )


# Collections


def create_collection(
    name: str,
    *,
    description: str = "",
    metadata: Metadata | None = None,
    chunk_tokens: int | None = None,
    block_size: Literal[8, 16, 32] | None = None,
    prefill: Prefill | None = None,
    max_kv_bytes: int = 0,
    system_prompt: str | None = None,
    primer: bool = False,
) -> Call[Collection]:
    """Creates a collection. Raises `CollectionExists`."""
    wanted = CollectionCreate(
        name=name,
        description=description,
        metadata=metadata or {},
        chunk_tokens=chunk_tokens,
        block_size=block_size,
        prefill=prefill,
        max_kv_bytes=max_kv_bytes,
        system_prompt=system_prompt,
        primer=primer,
    )
    return Call(
        method="POST",
        path="/v1/collections",
        reply=Collection,
        body=wanted,
        local=lambda memory: memory.create_collection(wanted),
        repeatable=False,
    )


def get_or_create_collection(
    name: str,
    *,
    description: str = "",
    metadata: Metadata | None = None,
    chunk_tokens: int | None = None,
    block_size: Literal[8, 16, 32] | None = None,
    prefill: Prefill | None = None,
    max_kv_bytes: int = 0,
    system_prompt: str | None = None,
    primer: bool = False,
) -> Call[Collection]:
    """The collection of this name, made if need be. Raises `ConflictError` if it has other settings."""
    wanted = CollectionCreate(
        name=name,
        description=description,
        metadata=metadata or {},
        chunk_tokens=chunk_tokens,
        block_size=block_size,
        prefill=prefill,
        max_kv_bytes=max_kv_bytes,
        system_prompt=system_prompt,
        primer=primer,
    )
    return Call(
        method="PUT",
        path=collection_path(name),
        reply=Collection,
        body=CollectionPut(**msgspec.structs.asdict(wanted)),
        local=lambda memory: memory.create_collection(wanted, exist_ok=True),
    )


def list_collections(
    *, limit: int = 20, order: Order = "asc", after: str = "", before: str = ""
) -> Listing[Collection]:
    """All collections; iterating reads one page after another."""

    def call_for(page: PageRequest) -> Call[Page[Collection]]:
        return Call(
            method="GET",
            path="/v1/collections",
            params=page_params(page),
            reply=Page[Collection],
            local=lambda memory: memory.list_collections(page),
        )

    return Listing(PageRequest(limit=limit, order=order, after=after, before=before), call_for)


def get_collection(name: str) -> Call[Collection]:
    """One collection with its counts. Raises `CollectionNotFound`."""
    path = collection_path(name)
    return Call(method="GET", path=path, reply=Collection, local=lambda memory: memory.get_collection(name))


def update_collection(
    name: str,
    *,
    description: str | None = None,
    prefill: Prefill | None = None,
    max_kv_bytes: int | None = None,
) -> Call[Collection]:
    """Changes what is given: `max_kv_bytes` caps the KV made for it, 0 takes the cap away."""
    wanted = CollectionPatch(description=description, prefill=prefill, max_kv_bytes=max_kv_bytes)
    return Call(
        method="PATCH",
        path=collection_path(name),
        reply=Collection,
        body=wanted,
        local=lambda memory: memory.update_collection(name, wanted),
    )


def delete_collection(name: str) -> Call[None]:
    """Deletes a collection with its documents. Raises `CollectionNotFound`."""
    path = collection_path(name)
    return Call(
        method="DELETE",
        path=path,
        reply=None,
        local=lambda memory: memory.delete_collection(name),
        repeatable=False,
    )


# Documents


def ingest_document(
    collection: str, document: DocumentCreate | DocumentUpload, *, keyed: bool = False, wait: float = 0.0
) -> Call[Accepted]:
    """Ingests one document; `keyed` replaces the one of the same external id."""
    path = f"{collection_path(collection)}/documents"
    if keyed:
        path = document_path(collection, document.external_id or "")
    return Call(
        method="PUT" if keyed else "POST",
        path=path,
        params=wait_params(wait),
        reply=Accepted,
        body=document if isinstance(document, DocumentCreate) else None,
        uploads=[document] if isinstance(document, DocumentUpload) else [],
        local=lambda memory: memory.ingest(collection, [document], wait=wait),
        repeatable=document.external_id is not None,
    )


def upload_documents(
    collection: str, uploads: Sequence[DocumentUpload], *, wait: float = 0.0
) -> Call[Accepted]:
    """Ingests several files as one job, which prefills their chunks together.

    One file that is refused refuses them all: nothing of them is kept. `wait` is for so many seconds.
    """
    return Call(
        method="POST",
        path=f"{collection_path(collection)}/documents",
        params=wait_params(wait),
        reply=Accepted,
        uploads=uploads,
        local=lambda memory: memory.ingest(collection, uploads, wait=wait),
        repeatable=all(upload.external_id is not None for upload in uploads),
    )


def estimate_documents(collection: str, uploads: Sequence[DocumentUpload]) -> Call[Estimate]:
    """What ingesting these files would cost: tokens, bytes, seconds, and whether it fits. Nothing is kept."""
    return Call(
        method="POST",
        path=f"{collection_path(collection)}/documents/estimate",
        reply=Estimate,
        uploads=uploads,
        local=lambda memory: memory.estimate(collection, uploads),
    )


def list_documents(
    collection: str,
    *,
    status: DocumentStatus | None = None,
    filter: Filter | None = None,
    limit: int = 20,
    order: Order = "asc",
    after: str = "",
    before: str = "",
) -> Listing[Document]:
    """A collection's documents; iterating reads one page after another."""

    def call_for(page: PageRequest) -> Call[Page[Document]]:
        more = {"status": status or "", "filter": "" if filter is None else json_param(filter)}
        return Call(
            method="GET",
            path=f"{collection_path(collection)}/documents",
            params=page_params(page, **more),
            reply=Page[Document],
            local=lambda memory: memory.list_documents(collection, page, status=status or "", filter=filter),
        )

    return Listing(PageRequest(limit=limit, order=order, after=after, before=before), call_for)


def get_document(collection: str, document: str) -> Call[Document]:
    """One document by its id or external id. Raises `DocumentNotFound`."""
    return Call(
        method="GET",
        path=document_path(collection, document),
        reply=Document,
        local=lambda memory: memory.get_document(collection, document),
    )


def delete_document(collection: str, document: str) -> Call[None]:
    """Forgets a document, by its id or external id. Raises `DocumentNotFound`."""
    return Call(
        method="DELETE",
        path=document_path(collection, document),
        reply=None,
        local=lambda memory: memory.forget(collection, document),
        repeatable=False,
    )


# Jobs


def list_jobs(
    *,
    kind: str = "",
    status: JobStatus | None = None,
    collection: str = "",
    limit: int = 20,
    order: Order = "asc",
    after: str = "",
    before: str = "",
) -> Listing[Job]:
    """Jobs; iterating reads one page after another. `kind` is such as `ingest` or `verify`."""

    def call_for(page: PageRequest) -> Call[Page[Job]]:
        return Call(
            method="GET",
            path="/v1/jobs",
            params=page_params(page, kind=kind, status=status or "", collection=collection),
            reply=Page[Job],
            local=lambda memory: memory.list_jobs(
                page, kind=kind, status=status or "", collection=collection
            ),
        )

    return Listing(PageRequest(limit=limit, order=order, after=after, before=before), call_for)


def get_job(job_id: str, *, wait: float = 0.0) -> Call[Job]:
    """One job; with `wait`, as soon as it is finished or after so many seconds. Raises `JobNotFound`."""
    return Call(
        method="GET",
        path=f"/v1/jobs/{segment(job_id)}",
        params=wait_params(wait),
        reply=Job,
        local=lambda memory: memory.wait_job(job_id, wait),
    )


def cancel_job(job: Job | str, *, wait: float = 0.0) -> Call[Job]:
    """Ends a job that has not ended: a queued one at once, a running one when what it has in hand is done.

    What it did stays; documents that it left undone have failed, with the code `cancelled`.

    Args:
        wait: seconds, at most, until it has ended.

    Raises:
        JobNotFound.
        ConflictError: it has ended already.
    """
    return _job_call(job, "cancel", wait, lambda memory, job_id: memory.cancel_job(job_id))


def retry_job(job: Job | str, *, wait: float = 0.0) -> Call[Job]:
    """Queues a job again that failed in part or as a whole, or was cancelled, for what it left undone.

    Args:
        wait: seconds, at most, until it has ended.

    Raises:
        JobNotFound.
        ConflictError: nothing of it is to be tried again.
    """
    return _job_call(job, "retry", wait, lambda memory, job_id: memory.retry_job(job_id))


def _job_call(job: Job | str, verb: str, wait: float, change: Callable[[Memory, str], Job]) -> Call[Job]:
    job_id = job if isinstance(job, str) else job.id

    def in_this_process(memory: Memory) -> Job:
        changed = change(memory, job_id)
        return memory.wait_job(job_id, wait) if wait > 0 else changed

    return Call(
        method="POST",
        path=f"/v1/jobs/{segment(job_id)}/{verb}",
        params=wait_params(wait),
        reply=Job,
        local=in_this_process,
        repeatable=False,
    )
