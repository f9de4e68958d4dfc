"""`/v1/info`: what this server runs."""

from __future__ import annotations

from litestar import Controller, get
from litestar.di import NamedDependency
from memkv.api.access import requires
from memkv.api.errors import problems
from memkv.api.memory_calls import MemoryCalls

from memkv.wire import Info


class ServiceController(Controller):
    tags = ("service",)

    @get(
        "/v1/info",
        summary="Version, model, embedder and limits",
        operation_id="info",
        opt=requires("read", "route"),  # nothing of any collection
        responses=problems(),
    )
    async def info(self, calls: NamedDependency[MemoryCalls]) -> Info:
        return await calls.run(lambda memory: memory.info())
