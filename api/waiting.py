"""`?wait=30` and `Prefer: wait=30`: answer when the job is done, or when the time is over."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import Any

from litestar import Request
from memkv.api.memory_calls import MemoryCalls

from memkv.errors import ServiceUnavailableError
from memkv.wire import Job

MAX_WAIT_SECONDS = 300.0

_FINISHED = frozenset({"succeeded", "partial", "failed", "cancelled"})
_FIRST_POLL_SECONDS = 0.02
_LAST_POLL_SECONDS = 0.5
_PREFER_WAIT = re.compile(r"(?:^|[,;])\s*wait\s*=\s*\"?(\d{1,9})\"?\s*(?=$|[,;])", re.IGNORECASE)


def requested_wait(request: Request[Any, Any, Any], wait: float | None) -> float:
    """Seconds that the client is willing to wait; the query parameter outweighs the header."""
    if wait is None:
        match = _PREFER_WAIT.search(request.headers.get("prefer", ""))
        wait = float(match[1]) if match else 0.0
    return min(wait, MAX_WAIT_SECONDS)


def is_finished(job: Job) -> bool:
    return job.status in _FINISHED


async def wait_for_job(calls: MemoryCalls, job: Job, seconds: float) -> Job:
    """The job once it is finished, or as it stands after `seconds` or when the server is about to stop.

    Looks at it now and then: a request that waits holds no thread.
    """
    job_id = job.id
    deadline = time.monotonic() + seconds
    pause = _FIRST_POLL_SECONDS
    while not is_finished(job) and not calls.drain.draining:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 1.5, _LAST_POLL_SECONDS)
        # The documents are kept already: a moment in which the server is full does not undo that.
        with contextlib.suppress(ServiceUnavailableError):
            job = await calls.run(lambda memory: memory.get_job(job_id))
    return job
