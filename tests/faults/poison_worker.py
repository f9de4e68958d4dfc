"""A server's job thread whose process dies whenever a text with the word poison is cut.

Run in a process of `fault_process`; it ends when no job is left.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from memkv.config import load_config
from memkv.memory import Memory
from memkv.text.cutter import Cutter
from memkv.wire import PageRequest

_cut = Cutter.cut


def cut(cutter: Cutter, text: str, *arguments: Any) -> Any:
    if "poison" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    return _cut(cutter, text, *arguments)


def work(flags: dict[str, object]) -> None:
    """`flags`: the configuration."""
    Cutter.cut = cut  # type: ignore[method-assign]
    with Memory.open(load_config(flags, env={})) as memory:
        for status in ("queued", "running"):
            for job in memory.list_jobs(PageRequest(limit=100), status=status).data:
                memory.wait_job(job.id, 60)
