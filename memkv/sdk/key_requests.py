"""Requests about access keys, without IO, in the form of `requests.py`."""

from __future__ import annotations

from collections.abc import Sequence

from memkv.sdk.call import Call, Listing, page_params, segment
from memkv.sdk.requests import Order
from memkv.wire import AccessKey, AccessKeyCreate, AccessKeyPatch, NewAccessKey, Page, PageRequest, Scope


def create_key(
    *,
    name: str = "",
    scope: Scope = "read",
    collections: Sequence[str] | None = None,
    expires_in: int = 0,
) -> Call[NewAccessKey]:
    """Makes a key; nothing tells its `secret` again.

    The first one has to be of scope admin; from then on a server asks for keys. Raises `ConflictError`.

    Args:
        name: for people.
        scope: `read` searches, asks and lists; `write` also ingests, changes and deletes; `admin` everything.
        collections: the names of those that it is for; by default all.
        expires_in: seconds from now; 0: never.
    """
    wanted = AccessKeyCreate(
        name=name,
        scope=scope,
        collections=None if collections is None else list(collections),
        expires_in=expires_in,
    )
    return Call(
        method="POST",
        path="/v1/keys",
        reply=NewAccessKey,
        body=wanted,
        local=lambda memory: memory.keys.create(wanted),
        repeatable=False,
    )


def list_keys(
    *, limit: int = 20, order: Order = "asc", after: str = "", before: str = ""
) -> Listing[AccessKey]:
    """All keys, also revoked and expired ones; iterating reads one page after another."""

    def call_for(page: PageRequest) -> Call[Page[AccessKey]]:
        return Call(
            method="GET",
            path="/v1/keys",
            params=page_params(page),
            reply=Page[AccessKey],
            local=lambda memory: memory.keys.list(page),
        )

    return Listing(PageRequest(limit=limit, order=order, after=after, before=before), call_for)


def get_key(key_id: str) -> Call[AccessKey]:
    """Raises `AccessKeyNotFound`."""
    return Call(
        method="GET", path=_path(key_id), reply=AccessKey, local=lambda memory: memory.keys.get(key_id)
    )


def update_key(
    key_id: str,
    *,
    name: str | None = None,
    scope: Scope | None = None,
    collections: Sequence[str] | None = None,
    expires_in: int | None = None,
    force: bool = False,
) -> Call[AccessKey]:
    """Changes what is given.

    Raises `AccessKeyNotFound`; `ConflictError` for a revoked key, and where no valid key of scope admin would
    be left, unless `force`.
    """
    wanted = AccessKeyPatch(
        name=name,
        scope=scope,
        collections=None if collections is None else list(collections),
        expires_in=expires_in,
        force=force,
    )
    return Call(
        method="PATCH",
        path=_path(key_id),
        reply=AccessKey,
        body=wanted,
        local=lambda memory: memory.keys.update(key_id, wanted),
    )


def delete_key(key_id: str, *, force: bool = False) -> Call[None]:
    """Revokes a key, at once and for good. Raises what `update` does."""
    return Call(
        method="DELETE",
        path=_path(key_id),
        params={"force": "true"} if force else {},
        reply=None,
        local=lambda memory: memory.keys.revoke(key_id, force=force),
        repeatable=False,
    )


def rotate_key(key_id: str) -> Call[NewAccessKey]:
    """Gives a key another `secret`, which nothing tells again; the old one is refused at once.

    Raises `AccessKeyNotFound`; `ConflictError` for a key that is revoked or expired.
    """
    return Call(
        method="POST",
        path=f"{_path(key_id)}/rotate",
        reply=NewAccessKey,
        local=lambda memory: memory.keys.rotate(key_id),
        repeatable=False,
    )


def _path(key_id: str) -> str:
    return f"/v1/keys/{segment(key_id)}"
