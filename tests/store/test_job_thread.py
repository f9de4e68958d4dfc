"""What a thread that works off jobs does where its work or the database fails it."""

from __future__ import annotations

from typing import Any

import pytest

from memkv.errors import DatabaseUnavailable
from memkv.memory import job_thread
from memkv.memory.job_thread import JobThread
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.rows import JobRow


def test_a_fault_that_cannot_be_written_down_at_once_is_written_down_later(
    plain_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(job: JobRow) -> dict[str, object]:
        raise ValueError("nobody expected this")

    jobs, refusals = plain_store.jobs, [DatabaseUnavailable("the database is busy")]
    finish = jobs.finish

    def finish_later(*args: Any, **more: Any) -> None:
        if refusals:
            raise refusals.pop()
        finish(*args, **more)

    monkeypatch.setattr(jobs, "finish", finish_later)
    monkeypatch.setattr(job_thread, "PAUSE_SECONDS", 0.01)
    first = jobs.create(DEFAULT_TENANT, "", "gc", ())
    thread = JobThread("test", plain_store, {"gc": work})
    thread.start()
    try:
        ended = jobs.wait(DEFAULT_TENANT, first.id, 10)
        assert thread.is_alive
    finally:
        thread.stop()
    assert not refusals
    assert ended.error is not None
    assert (ended.status, ended.error["code"]) == ("failed", "internal_error")
