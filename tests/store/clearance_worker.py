"""Processes that take up a queued job about the store and are killed in the middle of it, or just before its
end is written down.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from forker import serve

from memkv.config import load_config
from memkv.memory.job_thread import JobThread
from memkv.memory.stored import StoredMemory
from memkv.store.jobs import Jobs


def kill_at_piece(number: int) -> None:
    """Dies when a job tells for the `number`-th time how far it is."""
    left = [number]

    def tell(*_: Any, **__: Any) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    JobThread.tell = tell  # type: ignore[method-assign]


def kill_at_end() -> None:
    def finish(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Jobs.finish = finish  # type: ignore[method-assign]


def run_child(request: dict[str, Any]) -> None:
    if request["piece"]:
        kill_at_piece(request["piece"])
    else:
        kill_at_end()
    config = load_config(
        {"store.data_dir": request["data_dir"], "store.database_url": request["url"] or ""}, env={}
    )
    with StoredMemory.open_store(config) as memory:
        memory.wait_job(request["job"], 60)


if __name__ == "__main__":
    serve(run_child)
