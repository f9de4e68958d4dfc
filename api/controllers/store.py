"""`/v1/store`: what lies on disk."""

from __future__ import annotations

from litestar import Controller, get
from litestar.di import NamedDependency
from memkv.api.errors import problems
from memkv.api.memory_calls import MemoryCalls

from memkv.wire import StoreStats


class StoreController(Controller):
    tags = ("store",)

    @get(
        "/v1/store/stats", summary="Bytes, files and blocks", operation_id="store_stats", responses=problems()
    )
    async def stats(self, calls: NamedDependency[MemoryCalls]) -> StoreStats:
        return await calls.run(lambda memory: memory.store_stats())
