"""Who may ask for what: every route declares it by `requires` or `OPEN`, one guard holds requests to it.

As long as a store has no key, the server answers this machine only, and whoever is on it. From the first key
on a valid one is asked for, and nothing else: a key in a header is proof enough that no foreign web page
asks, whatever name the server is called by.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from memkv.api.memory_calls import MemoryCalls

from memkv.config import ServerConfig
from memkv.errors import PermissionDeniedError
from memkv.loopback import is_loopback
from memkv.wire import Scope

SCOPES: tuple[Scope, ...] = get_args(Scope)  # each allows what those before it do

_PORT = re.compile(r":\d*$")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a route asks of a key.

    Attributes:
        scope: the least one; None: no key is asked for.
        within: how the route keeps a key that is for some collections to them: "path": the path names the
            collection, and the guard compares; "route": the route does, by `Access`; "nowhere": it speaks of
            the whole store, and such a key is refused.
    """

    scope: Scope | None
    within: Literal["path", "route", "nowhere"] = "nowhere"


@dataclass(frozen=True, slots=True)
class Access:
    """What of the store a request may see.

    Attributes:
        key_id: of its key; empty where none was asked for.
        collections: their names; None: all.
        scope: what its key allows; everything where none was asked for.
    """

    key_id: str = ""
    collections: frozenset[str] | None = None
    scope: Scope = "admin"

    def require_scope(self, scope: Scope) -> None:
        """Raises `PermissionDeniedError`."""
        if SCOPES.index(self.scope) < SCOPES.index(scope):
            raise PermissionDeniedError(
                f"the access key has scope {self.scope}, and this needs {scope}",
                hint=f"use one of scope {scope}; memkv keys create makes it",
            )

    def require(self, collection: str) -> None:
        """Raises `PermissionDeniedError`, whether or not there is such a collection."""
        if self.collections is not None and collection not in self.collections:
            raise PermissionDeniedError(
                f"the access key is not for collection {collection}",
                hint=f"it is for {', '.join(sorted(self.collections))}",
            )


def requires(scope: Scope, within: Literal["path", "route", "nowhere"] = "nowhere") -> dict[str, Needs]:
    """The `opt` of a route, or of a controller."""
    return {"needs": Needs(scope, within)}


OPEN = {"needs": Needs(None)}


def needs_of(handler: BaseRouteHandler) -> Needs:
    """What a route declares. One that declares nothing is for administrators."""
    needs: Needs = handler.opt.get("needs", Needs("admin"))
    return needs


def provide_access(request: Request[Any, Any, Any]) -> Access:
    access: Access = request.auth
    return access


class Guard:
    """Refuses requests whose key does not allow what they ask for, before their bodies are read.

    Args:
        calls: to find the key by.
        config: unless `insecure`, the server of a store without keys is addressed as this machine and by
            nothing else: a web page that the user happens to visit reaches it neither under a name of its own
            that resolves to 127.0.0.1, nor by sending forms across sites.
    """

    def __init__(self, calls: MemoryCalls, config: ServerConfig) -> None:
        self._calls = calls
        self._config = config

    async def __call__(
        self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
    ) -> None:
        needs = needs_of(handler)
        if needs.scope is None:
            return
        secret = _secret_of(connection)
        key = await self._calls.look_up(lambda memory: memory.keys.key_of(secret))
        if key is None:
            if not self._config.insecure and self._is_foreign(connection):
                raise PermissionDeniedError(
                    "this server answers this machine only",
                    hint="ask for it as 127.0.0.1 or localhost; to let others in, make keys for them (memkv "
                    "keys create --scope admin), or set server.insecure",
                )
            connection.scope["auth"] = Access()
            return
        names = None if key.collections is None else frozenset(key.collections)
        access = Access(key.id, names, key.scope)
        connection.scope["auth"] = access
        connection.scope["state"]["key"] = key.id
        _require(access, needs, connection)

    def _is_foreign(self, connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
        scope: Any = connection.scope  # of HTTP: there are no other routes
        came_to = scope.get("server")
        if came_to is not None and not is_loopback(came_to[0]):
            return True
        if connection.headers.get("sec-fetch-site", "").strip() in ("cross-site", "same-site"):
            return scope["method"] not in ("GET", "HEAD", "OPTIONS")
        host = _PORT.sub("", connection.headers.get("host", "").strip())
        return host not in ("", self._config.host) and not is_loopback(host)


def _secret_of(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """What the request says its key is; empty where it says nothing."""
    scheme, _, credentials = connection.headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return connection.headers.get("x-api-key", "").strip()


def _require(access: Access, needs: Needs, connection: ASGIConnection[Any, Any, Any, Any]) -> None:
    assert needs.scope is not None, "bug: an open route was guarded"
    access.require_scope(needs.scope)
    if needs.within == "path":
        access.require(connection.path_params["collection"])
    elif needs.within == "nowhere" and access.collections is not None:
        raise PermissionDeniedError(
            "the access key is for some collections, and this is about the whole store",
            hint="use a key without collections",
        )
