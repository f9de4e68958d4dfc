"""`/v1/keys`: who may ask this server for what."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from memkv.api.access import requires
from memkv.api.errors import problems
from memkv.api.memory_calls import MemoryCalls
from memkv.api.params import After, Before, Force, KeyId, Limit, Order, page_request

from memkv.wire import AccessKey, AccessKeyCreate, AccessKeyPatch, NewAccessKey, Page

_UNKEPT = {"Cache-Control": "no-store"}  # by no proxy and no browser: it holds a secret


class KeysController(Controller):
    path = "/v1/keys"
    tags = ("keys",)
    opt = requires("admin")

    @post(
        summary="Make a key; the only answer with its secret",
        description="From the first key on, the server asks for one. That one has to be of scope admin.",
        operation_id="create_key",
        responses=problems(409, 413, 415, 507),
    )
    async def create(
        self, data: JSONBody[AccessKeyCreate], calls: NamedDependency[MemoryCalls]
    ) -> Response[NewAccessKey]:
        made = await calls.run(lambda memory: memory.keys.create(data))
        return Response(made, status_code=201, headers={"Location": f"/v1/keys/{made.id}", **_UNKEPT})

    @get(
        summary="List keys, also revoked and expired ones",
        operation_id="list_keys",
        responses=problems(),
    )
    async def list_keys(
        self,
        calls: NamedDependency[MemoryCalls],
        limit: Limit = 20,
        order: Order = "asc",
        after: After = "",
        before: Before = "",
    ) -> Page[AccessKey]:
        page = page_request(limit, order, after, before)
        return await calls.run(lambda memory: memory.keys.list(page))

    @get("/{key_id:str}", summary="One key", operation_id="get_key", responses=problems(404))
    async def get_key(self, key_id: KeyId, calls: NamedDependency[MemoryCalls]) -> AccessKey:
        return await calls.run(lambda memory: memory.keys.get(key_id))

    @patch(
        "/{key_id:str}",
        summary="Change a key's name, scope, collections or expiry",
        operation_id="update_key",
        responses=problems(404, 409, 413, 415, 507),
    )
    async def update_key(
        self, key_id: KeyId, data: JSONBody[AccessKeyPatch], calls: NamedDependency[MemoryCalls]
    ) -> AccessKey:
        return await calls.run(lambda memory: memory.keys.update(key_id, data))

    @delete(
        "/{key_id:str}",
        summary="Revoke a key, at once and for good; it stays listed",
        operation_id="delete_key",
        responses=problems(404, 409, 507),
    )
    async def delete_key(
        self, key_id: KeyId, calls: NamedDependency[MemoryCalls], force: Force = False
    ) -> None:
        await calls.run(lambda memory: memory.keys.revoke(key_id, force=force))

    @post(
        "/{key_id:str}/rotate",
        status_code=200,
        summary="Give a key a new secret, which is in no other answer; the old one is refused at once",
        operation_id="rotate_key",
        responses=problems(404, 409, 413, 415, 507),
    )
    async def rotate_key(self, key_id: KeyId, calls: NamedDependency[MemoryCalls]) -> Response[NewAccessKey]:
        made = await calls.run(lambda memory: memory.keys.rotate(key_id))
        return Response(made, headers=_UNKEPT)
