"""`/v1/collections`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from litestar import Controller, Response, delete, get, patch, post, put
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody
from memkv.api.access import Access, requires
from memkv.api.errors import problems
from memkv.api.memory_calls import MemoryCalls
from memkv.api.params import After, Before, CollectionName, Limit, Order, page_request

from memkv.errors import CollectionNotFound
from memkv.validation import Violation
from memkv.wire import Collection, CollectionCreate, CollectionPatch, CollectionPut, Page

if TYPE_CHECKING:
    from memkv.memory import Memory


class CollectionsController(Controller):
    path = "/v1/collections"
    tags = ("collections",)

    @post(
        summary="Create a collection",
        operation_id="create_collection",
        opt=requires("write", "route"),
        responses=problems(409, 413, 415, 507),
    )
    async def create(
        self,
        data: JSONBody[CollectionCreate],
        access: NamedDependency[Access],
        calls: NamedDependency[MemoryCalls],
    ) -> Response[Collection]:
        access.require(data.name)
        created = await calls.run(lambda memory: memory.create_collection(data))
        return Response(created, status_code=201, headers={"Location": f"/v1/collections/{created.name}"})

    @put(
        "/{collection:str}",
        summary="Create a collection, or get the one of this name",
        operation_id="create_or_get_collection",
        opt=requires("write", "path"),
        responses={
            201: ResponseSpec(data_container=Collection, description="Created", generate_examples=False),
            **problems(409, 413, 415, 507),
        },
    )
    async def create_or_get(
        self, collection: CollectionName, data: JSONBody[CollectionPut], calls: NamedDependency[MemoryCalls]
    ) -> Response[Collection]:
        if data.name not in (None, collection):
            raise Violation(f"must be {collection}, as in the path", "name")
        settings = {**msgspec.structs.asdict(data), "name": collection}
        wanted = CollectionCreate(**settings)
        existed = await calls.run(lambda memory: _exists(memory, collection))
        found = await calls.run(lambda memory: memory.create_collection(wanted, exist_ok=True))
        return Response(found, status_code=200 if existed else 201)

    @get(
        summary="List collections",
        operation_id="list_collections",
        opt=requires("read", "route"),
        responses=problems(),
    )
    async def list_collections(
        self,
        access: NamedDependency[Access],
        calls: NamedDependency[MemoryCalls],
        limit: Limit = 20,
        order: Order = "asc",
        after: After = "",
        before: Before = "",
    ) -> Page[Collection]:
        page = page_request(limit, order, after, before)
        return await calls.run(lambda memory: memory.list_collections(page, within=access.collections))

    @get(
        "/{collection:str}",
        summary="One collection with its counts",
        operation_id="get_collection",
        opt=requires("read", "path"),
        responses=problems(404),
    )
    async def get_collection(
        self, collection: CollectionName, calls: NamedDependency[MemoryCalls]
    ) -> Collection:
        return await calls.run(lambda memory: memory.get_collection(collection))

    @patch(
        "/{collection:str}",
        summary="Change a collection's description, cap, or when its KV is kept",
        operation_id="update_collection",
        opt=requires("write", "path"),
        responses=problems(404, 413, 415, 507),
    )
    async def update_collection(
        self, collection: CollectionName, data: JSONBody[CollectionPatch], calls: NamedDependency[MemoryCalls]
    ) -> Collection:
        return await calls.run(lambda memory: memory.update_collection(collection, data))

    @delete(
        "/{collection:str}",
        summary="Delete a collection with its documents",
        operation_id="delete_collection",
        opt=requires("write", "path"),
        responses=problems(404),
    )
    async def delete_collection(
        self, collection: CollectionName, calls: NamedDependency[MemoryCalls]
    ) -> None:
        await calls.run(lambda memory: memory.delete_collection(collection))


def _exists(memory: Memory, name: str) -> bool:
    try:
        memory.get_collection(name)
    except CollectionNotFound:
        return False
    return True
