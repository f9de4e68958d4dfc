"""The application: one object that holds routes, errors, documentation and the edge around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from litestar import Litestar
from litestar.di import Provide
from memkv.api.access import Guard, provide_access
from memkv.api.body import StrictRequest
from memkv.api.controllers import CONTROLLERS
from memkv.api.docs import DocsController
from memkv.api.drain import Drain
from memkv.api.edge import Edge
from memkv.api.errors import exception_handlers
from memkv.api.memory_calls import MemoryCalls

from memkv.config import Config

if TYPE_CHECKING:
    from memkv.memory import Memory

_MAX_FORM_PARTS = 1000


def create_app(memory: Memory, config: Config, *, drain: Drain | None = None) -> Litestar:
    """The ASGI application that serves `memory`.

    Args:
        memory: open; the caller closes it after the application has ended.
        config: its `server` section: limits and threads.
        drain: shared with whoever stops the server; one of its own by default.
    """
    drain = drain or Drain()
    calls = MemoryCalls(memory, config.server, drain)

    def provide_calls() -> MemoryCalls:
        return calls

    app = Litestar(
        route_handlers=[*CONTROLLERS, DocsController],
        guards=[Guard(calls, config.server)],
        dependencies={
            "access": Provide(provide_access, sync_to_thread=False),
            "calls": Provide(provide_calls, sync_to_thread=False),
        },
        exception_handlers=exception_handlers(),
        lifespan=[lambda _: calls.lifespan()],
        openapi_config=None,  # see `memkv.api.docs`
        request_class=StrictRequest,
        request_max_body_size=None,  # the edge counts, for every route and before anything is read
        multipart_form_part_limit=_MAX_FORM_PARTS,
        logging_config=None,
        debug=False,
    )
    app.asgi_handler = Edge(app.asgi_handler, drain, config.server)
    return app
