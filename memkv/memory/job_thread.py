"""A thread that works off the jobs of some kinds, one after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from memkv.errors import DatabaseDamaged, InternalServerError, MemKVError, StoreFenced
from memkv.memory.background_thread import BackgroundThread
from memkv.memory.replies import stored_problem
from memkv.store import Store
from memkv.store.catalog_job_ends import CANCELLED
from memkv.store.rows import JobRow

_log = structlog.get_logger(__name__)

IDLE_SECONDS = 60.0
PAUSE_SECONDS = 1.0  # after a failure

Work = Callable[[JobRow], dict[str, object]]  # returns what it counted


class JobCancelled(Exception):
    """The job in hand is not wanted any more."""


class _Stopped(Exception):
    """The thread was asked to stop in the middle of a job."""


class JobThread(BackgroundThread):
    """Asked to stop, it ends where its job tells how far it is, and puts the job back.

    A job may be claimed and may end on a full disk: it could be one that makes room.

    Args:
        works: what is done for a job of each kind.
    """

    def __init__(self, name: str, store: Store, works: Mapping[str, Work]) -> None:
        super().__init__(name, wake=store.jobs.announce)
        self._store = store
        self._works = works
        self._name = name
        self._owner = f"pid {os.getpid()}"

    def idle(self) -> float:
        """One turn without jobs; returns the seconds until the next."""
        return IDLE_SECONDS

    def tell(self, job: JobRow, stage: str, done: int, total: int, unit: str = "files") -> None:
        """Called between two pieces of a job's work; what it raises is to end the work there."""
        if self.stopping.is_set():
            raise _Stopped
        if self._store.jobs.is_cancelled(job.id):
            raise JobCancelled
        self._store.jobs.progress(job.id, stage=stage, done=done, total=total, unit=unit)

    def run(self) -> None:
        job: JobRow | None = None  # claimed, and not yet ended or given back
        next_turn = time.monotonic() + IDLE_SECONDS
        while not self.stopping.is_set():
            try:
                if job is not None:
                    self._store.jobs.release(job.id)
                job = self._claim(max(0.0, next_turn - time.monotonic()))
                if job is not None:
                    self._run(job)
                    job = None
                elif time.monotonic() >= next_turn:
                    next_turn = time.monotonic() + self.idle()
            except _Stopped:
                if job is not None:
                    self._store.jobs.release(job.id)
                return
            except (StoreFenced, DatabaseDamaged) as error:
                self._log_error("job_thread_ended", error)
                return
            except MemKVError as error:  # the database is busy or away
                self._log_error("job_thread_waits", error)
                self.stopping.wait(PAUSE_SECONDS)
            except Exception:  # noqa: BLE001  # the thread's top: what nobody expected ends its job alone
                _log.exception("job_failed", thread=self._name)
                if job is not None:
                    with suppress(MemKVError):  # it is put back, and fails again
                        self._fail(job, InternalServerError("the job failed for a fault of memkv's"))
                        job = None
                self.stopping.wait(PAUSE_SECONDS)

    def _claim(self, patience: float) -> JobRow | None:
        kinds = tuple(self._works)
        return self._store.reserve.spend_on(
            lambda: self._store.jobs.claim(self._owner, kinds=kinds, timeout=patience)
        )

    def _run(self, job: JobRow) -> None:
        try:
            counts = self._works[job.kind](job)
        except StoreFenced:
            raise
        except JobCancelled:
            self._end(lambda: self._store.jobs.finish(job.id, "cancelled", error=CANCELLED))
        except MemKVError as error:  # whoever waits for the job is told, even that the database is damaged
            self._fail(job, error)
        else:
            self._end(lambda: self._store.jobs.finish(job.id, "succeeded", counts=counts))

    def _fail(self, job: JobRow, error: MemKVError) -> None:
        self._end(lambda: self._store.jobs.finish(job.id, "failed", error=stored_problem(error)))

    def _end(self, finish: Callable[[], None]) -> None:
        self._store.reserve.spend_on(finish)
        self._store.reserve.fill()

    def _log_error(self, event: str, error: MemKVError) -> None:
        _log.warning(event, thread=self._name, code=error.code, detail=error.detail, hint=error.hint)
