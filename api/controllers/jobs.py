"""`/v1/jobs`: work that outlasts the request that asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from litestar import Controller, Request, Response, get, post
from litestar.di import NamedDependency
from memkv.api.access import Access, requires
from memkv.api.errors import problems
from memkv.api.memory_calls import MemoryCalls
from memkv.api.params import (
    After,
    Before,
    CollectionFilter,
    JobId,
    JobKindFilter,
    JobStatusFilter,
    Limit,
    Order,
    Wait,
    finite,
    page_request,
)
from memkv.api.waiting import requested_wait, wait_for_job

from memkv.wire import Job, Page

if TYPE_CHECKING:
    from memkv.memory import Memory


class JobsController(Controller):
    path = "/v1/jobs"
    tags = ("jobs",)
    opt = requires("read", "route")

    @get(summary="List jobs", operation_id="list_jobs", responses=problems(404))
    async def list_jobs(
        self,
        access: NamedDependency[Access],
        calls: NamedDependency[MemoryCalls],
        limit: Limit = 20,
        order: Order = "asc",
        after: After = "",
        before: Before = "",
        kind: JobKindFilter = None,
        status: JobStatusFilter = None,
        collection: CollectionFilter = None,
    ) -> Page[Job]:
        if collection:
            access.require(collection)
        page = page_request(limit, order, after, before)
        return await calls.run(
            lambda memory: memory.list_jobs(
                page,
                kind=kind or "",
                status=status or "",
                collection=collection or "",
                within=access.collections,
            )
        )

    @get(
        "/{job_id:str}",
        summary="One job; with `wait`, as soon as it is finished",
        operation_id="get_job",
        responses=problems(404),
    )
    async def get_job(
        self,
        request: Request[Any, Any, Any],
        job_id: JobId,
        access: NamedDependency[Access],
        calls: NamedDependency[MemoryCalls],
        wait: Wait = None,
    ) -> Job:
        seconds = requested_wait(request, finite(wait))
        job = await calls.run(lambda memory: memory.get_job(job_id, within=access.collections))
        return await wait_for_job(calls, job, seconds)

    @post(
        "/{job_id:str}/cancel",
        status_code=202,
        summary="End a job that has not ended",
        description=(
            "One that waits ends at once, one that runs when what it has in hand is done. What it did stays; "
            "documents that it left undone have failed, with the code `cancelled`."
        ),
        operation_id="cancel_job",
        opt=requires("write", "route"),
        responses=problems(404, 409, 413, 415),
    )
    async def cancel_job(
        self,
        request: Request[Any, Any, Any],
        job_id: JobId,
        access: NamedDependency[Access],
        calls: NamedDependency[MemoryCalls],
        wait: Wait = None,
    ) -> Response[Job]:
        seconds = requested_wait(request, finite(wait))
        await _require(calls, access, job_id)
        return await _changed(calls, seconds, lambda memory: memory.cancel_job(job_id))

    @post(
        "/{job_id:str}/retry",
        status_code=202,
        summary="Queue a job again that did not succeed, for what it left undone",
        operation_id="retry_job",
        opt=requires("write", "route"),
        responses=problems(404, 409, 413, 415),
    )
    async def retry_job(
        self,
        request: Request[Any, Any, Any],
        job_id: JobId,
        access: NamedDependency[Access],
        calls: NamedDependency[MemoryCalls],
        wait: Wait = None,
    ) -> Response[Job]:
        seconds = requested_wait(request, finite(wait))
        await _require(calls, access, job_id)
        return await _changed(calls, seconds, lambda memory: memory.retry_job(job_id))


async def _require(calls: MemoryCalls, access: Access, job_id: str) -> None:
    """Jobs about the store are for those who may start them. Raises `PermissionDeniedError`."""
    job = await calls.run(lambda memory: memory.get_job(job_id, within=access.collections))
    if job.kind != "ingest":
        access.require_scope("admin")


async def _changed(calls: MemoryCalls, seconds: float, call: Callable[[Memory], Job]) -> Response[Job]:
    job = await wait_for_job(calls, await calls.run(call), seconds)
    return Response(job, status_code=202, headers={"Location": f"/v1/jobs/{job.id}"})
