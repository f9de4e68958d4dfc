"""A real server on a loopback port, in a thread of the test process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from memkv.api.app import create_app
from memkv.api.drain import Drain
from memkv.api.protocol import HTTPProtocol
from memkv.api.serve import listen

from memkv.config import Config


@dataclass
class LiveServer:
    url: str
    port: int
    drain: Drain


@contextlib.contextmanager
def live_server(memory: Any, config: Config) -> Iterator[LiveServer]:
    """Serves `memory` until the block ends."""
    sock = listen(config.server)
    port = sock.getsockname()[1]
    drain = Drain()
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    settings = uvicorn.Config(
        create_app(memory, config, drain=drain),
        access_log=False,
        http=HTTPProtocol,
        lifespan="on",
        log_config=None,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    server = Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert started.wait(20), "the server did not start"
    try:
        yield LiveServer(url=f"http://127.0.0.1:{port}", port=port, drain=drain)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
