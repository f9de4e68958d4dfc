"""The real server with the fake model, in a process of its own."""

from __future__ import annotations

import importlib
import tempfile
import threading
from pathlib import Path
from typing import Any

from fault_journal import Journal
from fault_life import NAME, check_answer, put
from fault_model import fake_models, fault_config
from memkv.api.app import create_app

from memkv.memory import Memory
from memkv.wire import CollectionCreate


def warm_up() -> None:
    """Everything that a first life imports and makes once, in the process that others are forked from.

    What a fork takes along is what a process computes once; every store, connection and thread is closed.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, fake_models():
        config = fault_config(f"{directory}/data")
        with Memory.open(config) as memory:
            memory.create_collection(CollectionCreate(name=NAME))
            put(memory, Journal("/dev/null"), "first", [1])
            assert check_answer(memory, "first", 1) == []
            create_app(memory, config)
    assert threading.active_count() == 1, threading.enumerate()


def serve(data_dir: str, url: str | None, started: str, **changes: Any) -> None:
    """What `memkv serve` does; writes the server's URL to the file `started` once it answers."""
    server = importlib.import_module("memkv.api.serve")
    config = fault_config(data_dir, url, **changes)
    sock = server.listen(config.server)
    fresh = Path(f"{started}.new")

    def tell(address: str) -> None:
        fresh.write_text(address)
        fresh.rename(started)

    with fake_models(), Memory.open(config) as memory:
        server.serve(memory, config, sock=sock, on_start=tell)
