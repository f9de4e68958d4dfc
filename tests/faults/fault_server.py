"""The real server with the fake model, in a process of its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from fault_model import fake_models, fault_config

from memkv.memory import Memory


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
