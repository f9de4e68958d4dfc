"""`/v1/search` and `/v1/query`."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from memkv.api.access import Access, requires
from memkv.api.errors import problems
from memkv.api.event_pump import EventPump
from memkv.api.event_stream import EventStream
from memkv.api.memory_calls import MemoryCalls
from memkv.api.operations import QueryOperation

from memkv.errors import InternalServerError, error_for
from memkv.wire import (
    QueryCompleted,
    QueryFailed,
    QueryRequest,
    QueryResponse,
    SearchRequest,
    SearchResponse,
)


class QueriesController(Controller):
    tags = ("queries",)

    @post(
        "/v1/search",
        status_code=200,
        summary="Find the chunks nearest to a text",
        operation_id="search",
        opt=requires("read", "route"),
        responses=problems(404, 409, 413, 415, 424),
    )
    async def search(
        self,
        data: JSONBody[SearchRequest],
        access: NamedDependency[Access],
        calls: NamedDependency[MemoryCalls],
    ) -> SearchResponse:
        access.require(data.collection)
        return await calls.run(lambda memory: memory.search(data))

    @post(
        "/v1/query",
        status_code=200,
        summary="Answer a question from a collection, with citations",
        operation_id="query",
        opt=requires("read", "route"),
        operation_class=QueryOperation,
        responses=problems(404, 409, 413, 415, 424),
    )
    async def query(
        self,
        request: Request[Any, Any, Any],
        data: JSONBody[QueryRequest],
        access: NamedDependency[Access],
        calls: NamedDependency[MemoryCalls],
    ) -> Response[QueryResponse]:
        access.require(data.collection)
        pump = EventPump(calls, data, request.receive)
        if data.stream or "text/event-stream" in request.headers.get("accept", "").lower():
            return EventStream(pump)  # type: ignore[return-value]  # its content is events
        return Response(await _complete(pump))


async def _complete(pump: EventPump) -> QueryResponse:
    """The whole answer. It is generated as a stream, so that it ends when nobody waits for it any more."""
    async with pump:
        while True:
            event = await pump.next()
            if isinstance(event, QueryCompleted):
                return event.response
            if isinstance(event, QueryFailed):
                problem = event.problem
                raise error_for(problem.code, problem.status)(problem.detail, hint=problem.hint)
            if event is None:
                raise InternalServerError("the answer ended without its last event")
