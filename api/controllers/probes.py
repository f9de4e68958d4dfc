"""`/healthz`, `/readyz` and `/metrics`: for whoever watches the server. The first two never wait."""

from __future__ import annotations

import asyncio

from litestar import Controller, Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from memkv.api.access import OPEN, requires
from memkv.api.errors import problems
from memkv.api.memory_calls import MemoryCalls
from memkv.api.metrics import TEXT, exposition

from memkv.wire import Check, Health, Readiness

READY_SECONDS = 5.0  # a check that takes longer counts as failed


class ProbesController(Controller):
    tags = ("probes",)

    @get("/healthz", summary="Is the process up", operation_id="health", opt=OPEN)
    async def health(self) -> Health:
        return Health()

    @get(
        "/readyz",
        summary="Can it answer requests",
        operation_id="ready",
        opt=OPEN,
        responses={503: ResponseSpec(data_container=Readiness, description="Not ready; each check says why")},
    )
    async def ready(self, calls: NamedDependency[MemoryCalls]) -> Response[Readiness]:
        readiness = await _readiness(calls)
        return Response(readiness, status_code=200 if readiness.status == "ready" else 503)

    @get(
        "/metrics",
        media_type=TEXT,
        summary="Every number of the store and the engine, for Prometheus",
        operation_id="metrics",
        opt=requires("read"),
        responses=problems(),
    )
    async def metrics(self, calls: NamedDependency[MemoryCalls]) -> Response[bytes]:
        gathered = await calls.run(lambda memory: memory.metrics())
        return Response(exposition(gathered), media_type=TEXT)


async def _readiness(calls: MemoryCalls) -> Readiness:
    if calls.drain.draining:
        return _not_ready("server", "about to stop")
    try:
        async with asyncio.timeout(READY_SECONDS):
            return await calls.probe(lambda memory: memory.ready())
    except TimeoutError:
        return _not_ready("memory", f"no answer within {READY_SECONDS:g} s")


def _not_ready(check: str, reason: str) -> Readiness:
    return Readiness(status="not_ready", checks={check: Check(ok=False, reason=reason)})
