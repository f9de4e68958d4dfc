"""`/v1/collections/{collection}/documents`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Controller, Request, Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from memkv.api.access import requires
from memkv.api.errors import problems
from memkv.api.memory_calls import MemoryCalls
from memkv.api.operations import IngestOperation
from memkv.api.params import (
    After,
    Before,
    CollectionName,
    DocumentPath,
    DocumentStatusFilter,
    FilterText,
    Limit,
    Order,
    Wait,
    document_key,
    finite,
    page_request,
    parse_filter,
)
from memkv.api.uploads import read_documents
from memkv.api.waiting import is_finished, requested_wait, wait_for_job

from memkv.errors import DocumentNotFound, ServiceUnavailableError
from memkv.validation import Violation
from memkv.wire import (
    Accepted,
    AcceptedDocument,
    Document,
    DocumentCreate,
    DocumentUpload,
    Estimate,
    Page,
)

if TYPE_CHECKING:
    from memkv.memory import Memory

_INGEST_RESPONSES = {
    202: ResponseSpec(
        data_container=Accepted,
        description="Kept; the job at `Location` makes it ready",
        generate_examples=False,
    ),
    **problems(404, 409, 413, 415, 422, 424, 507),
}


class DocumentsController(Controller):
    path = "/v1/collections/{collection:str}/documents"
    tags = ("documents",)

    @post(
        status_code=200,
        summary="Ingest a text, or files",
        operation_id="create_documents",
        opt=requires("write", "path"),
        operation_class=IngestOperation,
        response_description="Nothing left to do: finished within `wait`, or unchanged",
        responses=_INGEST_RESPONSES,
    )
    async def create(
        self,
        request: Request[Any, Any, Any],
        collection: CollectionName,
        calls: NamedDependency[MemoryCalls],
        wait: Wait = None,
    ) -> Response[Accepted]:
        seconds = requested_wait(request, finite(wait))
        return await _ingest(calls, collection, await read_documents(request), seconds)

    @post(
        "/estimate",
        status_code=200,
        summary="What ingesting this would cost; nothing is kept",
        operation_id="estimate_documents",
        opt=requires("read", "path"),
        operation_class=IngestOperation,
        responses=problems(404, 409, 413, 415, 422, 424),
    )
    async def estimate(
        self,
        request: Request[Any, Any, Any],
        collection: CollectionName,
        calls: NamedDependency[MemoryCalls],
    ) -> Estimate:
        documents = await read_documents(request)
        return await calls.run(lambda memory: memory.estimate(collection, documents))

    @put(
        "/{document:path}",
        summary="Create or replace the document of this external id",
        operation_id="upsert_document",
        opt=requires("write", "path"),
        operation_class=IngestOperation,
        response_description="Nothing left to do: finished within `wait`, or unchanged",
        responses=_INGEST_RESPONSES,
    )
    async def upsert(
        self,
        request: Request[Any, Any, Any],
        collection: CollectionName,
        document: DocumentPath,
        calls: NamedDependency[MemoryCalls],
        wait: Wait = None,
    ) -> Response[Accepted]:
        external_id = document_key(request)
        seconds = requested_wait(request, finite(wait))
        documents = await read_documents(request)
        if len(documents) != 1:
            raise Violation("must be one file", "file")
        if documents[0].external_id not in (None, external_id):
            raise Violation(f"must be {external_id}, as in the path", "external_id")
        keyed = msgspec.structs.replace(documents[0], external_id=external_id)
        return await _ingest(calls, collection, [keyed], seconds)

    @get(
        summary="List documents",
        operation_id="list_documents",
        opt=requires("read", "path"),
        responses=problems(404),
    )
    async def list_documents(
        self,
        collection: CollectionName,
        calls: NamedDependency[MemoryCalls],
        limit: Limit = 20,
        order: Order = "asc",
        after: After = "",
        before: Before = "",
        status: DocumentStatusFilter = None,
        filter: FilterText = None,
    ) -> Page[Document]:
        page = page_request(limit, order, after, before)
        wanted = parse_filter(filter)
        return await calls.run(
            lambda memory: memory.list_documents(collection, page, status=status or "", filter=wanted)
        )

    @get(
        "/{document:path}",
        summary="One document, by its id or external id",
        operation_id="get_document",
        opt=requires("read", "path"),
        responses=problems(404),
    )
    async def get_document(
        self,
        request: Request[Any, Any, Any],
        collection: CollectionName,
        document: DocumentPath,
        calls: NamedDependency[MemoryCalls],
    ) -> Document:
        key = document_key(request)
        return await calls.run(lambda memory: memory.get_document(collection, key))

    @delete(
        "/{document:path}",
        summary="Forget a document",
        operation_id="delete_document",
        opt=requires("write", "path"),
        responses=problems(404),
    )
    async def delete_document(
        self,
        request: Request[Any, Any, Any],
        collection: CollectionName,
        document: DocumentPath,
        calls: NamedDependency[MemoryCalls],
    ) -> None:
        key = document_key(request)
        await calls.run(lambda memory: memory.forget(collection, key))


async def _ingest(
    calls: MemoryCalls,
    collection: str,
    documents: list[DocumentCreate | DocumentUpload],
    seconds: float,
) -> Response[Accepted]:
    accepted = await calls.run(lambda memory: memory.ingest(collection, documents))
    job = accepted.job
    if job is None:
        return Response(accepted, status_code=200)
    if seconds > 0 and not is_finished(job):
        job = await wait_for_job(calls, job, seconds)
        accepted = msgspec.structs.replace(accepted, job=job)
        with contextlib.suppress(ServiceUnavailableError):
            accepted = await calls.run(lambda memory: _refreshed(memory, collection, accepted))
    status = 200 if is_finished(job) else 202
    return Response(accepted, status_code=status, headers={"Location": f"/v1/jobs/{job.id}"})


def _refreshed(memory: Memory, collection: str, accepted: Accepted) -> Accepted:
    """The same answer with the documents as they stand now."""

    def refresh(entry: AcceptedDocument) -> AcceptedDocument:
        try:
            status = memory.get_document(collection, entry.id).status
        except DocumentNotFound:  # deleted meanwhile
            return entry
        return msgspec.structs.replace(entry, status=status)

    return Accepted(job=accepted.job, documents=[refresh(entry) for entry in accepted.documents])
