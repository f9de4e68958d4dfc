"""Runs the server: where it listens, and how it stops.

On SIGTERM or SIGINT new requests get 503 while running ones go on. When none is left, when `drain_seconds`
are over, or on a second signal, what still runs is told so (an `error` event, or 503) and the sockets close.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import structlog
import uvicorn
from memkv.api.app import create_app
from memkv.api.drain import Drain
from memkv.api.log import configure_logging
from memkv.api.protocol import HTTPProtocol

from memkv.config import Config, ServerConfig
from memkv.errors import ConfigError
from memkv.loopback import is_loopback
from memkv.store.restoration import restore_between

if TYPE_CHECKING:
    from memkv.memory import Memory
    from memkv.memory.administration import Restoration

_KEEP_ALIVE_SECONDS = 75  # longer than clients keep an idle connection, so that it is they who close it
_FLUSH_SECONDS = 2  # for the last words of requests that were cut
_BACKLOG = 1024

_log = structlog.get_logger("memkv.api")


def listen(config: ServerConfig, *, wants_keys: Callable[[], bool] = lambda: False) -> socket.socket:
    """A listening socket; call it before the model is loaded, so that a taken port shows at once.

    Args:
        wants_keys: whether whoever asks will be asked for a key.

    Raises:
        ConfigError: the address does not exist or is taken; or it is not loopback, no key will be asked for,
            and `insecure` is not set.
    """
    family, address = _resolve(config, wants_keys)
    # Named as TCP: asyncio leaves Nagle's algorithm on for all else, and a body waits 40 ms behind its head.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, config.port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _bind_error(config, error) from error
    sock.setblocking(False)
    return sock


def serve_until_told(
    open_memory: Callable[[], Memory],
    config: Config,
    *,
    sock: socket.socket,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serves until the process is told to stop; where a snapshot is to be restored, closes the memory,
    restores, and serves what is there then. Who connects meanwhile waits.

    Args:
        open_memory: a memory of this configuration.
        sock: from `listen`; closed in the end.
        on_start: called with the server's URL once it answers for the first time.

    Raises:
        MemKVError: the memory cannot be opened.
    """
    with sock:
        while True:
            with open_memory() as memory:
                # the server closes what it listens on, and whoever connects is to wait for the next one
                restoration = serve(memory, config, sock=sock.dup(), on_start=on_start, serves_again=True)
            if restoration is None:
                return
            on_start = None
            _restore(config, restoration)


def serve(
    memory: Memory,
    config: Config,
    *,
    sock: socket.socket | None = None,
    on_start: Callable[[str], None] | None = None,
    serves_again: bool = False,
) -> Restoration | None:
    """Serves `memory` until the process is told to stop, or a snapshot is to be restored, which is returned;
    no request runs any more then.

    Args:
        memory: open; the caller closes it afterwards.
        config: its sections `server` and `log`.
        sock: from `listen`; made here by default.
        on_start: called with the server's URL once it answers.
        serves_again: whether the caller restores snapshots.

    Raises:
        ConfigError: see `listen`.
    """
    sock = sock or listen(config.server)
    configure_logging(config.log)
    _tell_store(memory)
    drain = Drain(serves_again=serves_again)
    app = create_app(memory, config, drain=drain)
    settings = uvicorn.Config(
        app,
        access_log=False,
        http=HTTPProtocol,
        lifespan="on",
        log_config=None,
        loop="asyncio",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        ws="none",
    )
    url = _url(sock)
    server = _DrainingServer(settings, drain, config.server.drain_seconds, lambda: _started(url, on_start))
    server.run(sockets=[sock])
    return drain.restoration


class _DrainingServer(uvicorn.Server):
    def __init__(
        self, settings: uvicorn.Config, drain: Drain, drain_seconds: float, on_start: Callable[[], None]
    ) -> None:
        super().__init__(settings)
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._on_start = on_start
        self._deadline: float | None = None  # while it drains

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._drain.restoration = None  # who stops the server wants it to end
        if self._drain.draining:
            self._deadline = 0.0
        else:
            self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        if self._drain.draining and self._deadline is None:
            self._deadline = time.monotonic() + self._drain_seconds
        if self._deadline is not None and (self._drain.running == 0 or time.monotonic() >= self._deadline):
            _log.info("stopping", requests_cut=self._drain.running)
            self._drain.cut()
            self.should_exit = True
        return await super().on_tick(counter)


def _restore(config: Config, restoration: Restoration) -> None:
    snapshot = restoration.reply.snapshot.id
    _log.warning("restoring", snapshot=snapshot)
    failure = restore_between(
        Path(config.store.data_dir),
        config.store.database_url or None,
        restoration.job,
        busy_seconds=config.store.busy_seconds,
    )
    if failure is not None:
        _log.error("not_restored", snapshot=snapshot, detail=failure.detail, hint=failure.hint)


def _tell_store(memory: Memory) -> None:
    """What durability rests on, as the database itself reports it."""
    stats = memory.store_stats()
    _log.info("store", data_dir=stats.data_dir, generation=stats.generation, **stats.database)
    for warning in stats.warnings:
        _log.warning("store_is_less_durable", detail=warning)
    if memory.keys.lack_admin():
        _log.warning("no_admin_key", hint="memkv keys create --scope admin, on the data directory")
    if stats.stale:
        _log.warning("stale_collections", names=stats.stale, hint="memkv store reprefill NAME")


def _started(url: str, on_start: Callable[[str], None] | None) -> None:
    _log.info("listening", url=url)
    if on_start is not None:
        on_start(url)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(config: ServerConfig, wants_keys: Callable[[], bool]) -> tuple[socket.AddressFamily, str]:
    host = config.host.strip("[]")
    if not host:
        raise ConfigError("server.host is empty", hint="127.0.0.1 for this machine only")
    try:
        found = socket.getaddrinfo(host, config.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(
            f"server.host = {config.host!r} is no address of this machine",
            hint="127.0.0.1 for this machine only",
        ) from error
    addresses = [str(entry[4][0]) for entry in found]
    loopback = all(is_loopback(address) for address in addresses)
    if not loopback and not config.insecure and not wants_keys():
        raise ConfigError(
            f"server.host = {config.host} would let other machines in, and nothing checks who asks",
            hint="make a key first: memkv keys create --scope admin; or listen on 127.0.0.1; or, where the "
            "network is trusted, say --insecure (server.insecure)",
        )
    return found[0][0], addresses[0]


def _bind_error(config: ServerConfig, error: OSError) -> ConfigError:
    place = f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{place} is taken by another process", hint=f"choose another port: --port {config.port + 1}"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(f"this user may not listen on {place}", hint="choose a port above 1023")
    return ConfigError(f"cannot listen on {place}: {error.strerror}", hint="see server.host and server.port")
