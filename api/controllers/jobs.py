"""`/v1/jobs`: work that outlasts the request that asked for it."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, get
from litestar.di import NamedDependency
from memkv.api.access import Access, requires
from memkv.api.errors import problems
from memkv.api.memory_calls import MemoryCalls
from memkv.api.params import (
    After,
    Before,
    CollectionFilter,
    JobId,
    JobStatusFilter,
    Limit,
    Order,
    Wait,
    finite,
    page_request,
)
from memkv.api.waiting import requested_wait, wait_for_job

from memkv.wire import Job, Page


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
        status: JobStatusFilter = None,
        collection: CollectionFilter = None,
    ) -> Page[Job]:
        if collection:
            access.require(collection)
        page = page_request(limit, order, after, before)
        return await calls.run(
            lambda memory: memory.list_jobs(
                page, status=status or "", collection=collection or "", within=access.collections
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
