"""The OpenAPI document at `/openapi.json`, and a page at `/docs` that shows it and asks no other host."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from litestar import Controller, Litestar, Response, get
from litestar.di import Provide
from litestar.exceptions import NotFoundException
from litestar.openapi import OpenAPIConfig
from litestar.params import FromPath
from litestar.routes import HTTPRoute
from memkv.api.access import OPEN, needs_of
from memkv.api.controllers import CONTROLLERS
from memkv.api.operations import SCHEMA_REF

from memkv import __version__, wire
from memkv.wire import AccessKey, Collection, Document, Job, Page, QueryEvent, StoreFile

_STATIC = Path(__file__).parent / "static"
_ASSETS = {
    "swagger-ui-bundle.js": (_STATIC / "swagger-ui" / "swagger-ui-bundle.js", "text/javascript"),
    "swagger-ui.css": (_STATIC / "swagger-ui" / "swagger-ui.css", "text/css"),
    "favicon-32x32.png": (_STATIC / "swagger-ui" / "favicon-32x32.png", "image/png"),
    "docs.js": (_STATIC / "docs.js", "text/javascript"),
}
_PAGE_HEADERS = {
    # The browser itself keeps the page from other hosts.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
}
_PAGES = (Page[Collection], Page[Document], Page[Job], Page[StoreFile], Page[AccessKey])
_ASKED_FOR = "An access key, asked for from the first one on that was made"
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": _ASKED_FOR},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": _ASKED_FOR},
}


class DocsController(Controller):
    opt = OPEN

    @get("/openapi.json")
    async def openapi(self) -> Response[bytes]:
        document = await asyncio.to_thread(openapi_document, CONTROLLERS)
        return Response(document, media_type="application/json")

    @get("/docs")
    async def page(self) -> Response[bytes]:
        html = _read(_STATIC / "docs.html")
        return Response(html, media_type="text/html", headers=_PAGE_HEADERS)

    @get("/docs/assets/{name:str}")
    async def asset(self, name: FromPath[str]) -> Response[bytes]:
        if name not in _ASSETS:
            raise NotFoundException
        path, media_type = _ASSETS[name]
        return Response(_read(path), media_type=media_type, headers={"Cache-Control": "max-age=3600"})


@cache
def openapi_document(controllers: tuple[type[Controller], ...]) -> bytes:
    """The OpenAPI document of these routes, as JSON.

    Made by an application of its own: the one that serves then has none of the framework's pages, which load
    their parts from other hosts. Schemas are msgspec's: they say every constraint, and unions as `anyOf`.
    """
    config = OpenAPIConfig(
        title="memkv",
        version=__version__,
        description="A memory for language models: documents are read once, questions map what was read.",
        create_examples=False,
    )
    unused = {name: Provide(lambda: None, sync_to_thread=False) for name in ("access", "calls")}
    described = Litestar(
        route_handlers=controllers,
        dependencies=unused,  # the signatures name them
        openapi_config=config,
        logging_config=None,
    )
    document = described.openapi_schema.to_schema()
    _tell_needs(described, document)
    kinds = [
        kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    plain = [kind for kind in kinds if kind not in (Page, wire.Request, wire.Reply, msgspec.Struct)]
    (*_, event), schemas = msgspec.json.schema_components(
        (*plain, *_PAGES, QueryEvent), ref_template=SCHEMA_REF
    )
    document["components"] = {
        "schemas": {**schemas, "QueryEvent": event},
        "securitySchemes": _SECURITY_SCHEMES,
    }
    # The framework puts the module into the name of a generic's component, msgspec does not.
    return msgspec.json.encode(document).replace(b"/Page_memkv.wire.", b"/Page_")


def _tell_needs(described: Litestar, document: dict[str, Any]) -> None:
    """Writes the scope that each route asks of a key into its operation."""
    for route in described.routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                scope = needs_of(handler).scope
                for method in handler.http_methods:
                    operation = document["paths"].get(route.path_format, {}).get(method.lower())
                    if operation is not None and scope is not None:
                        operation["security"] = [{name: [scope]} for name in _SECURITY_SCHEMES]


@cache
def _read(path: Path) -> bytes:
    return path.read_bytes()
