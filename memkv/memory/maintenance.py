"""The thread that keeps a store: jobs about the store itself, and what is done when there are none.

When idle it writes down how often chunks were used, tries documents again that found no room, and reads block
files that nobody read for long, so that damage is found before somebody needs them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import inf

import msgspec
import structlog

from memkv.config import StoreConfig
from memkv.errors import DatabaseDamaged, InternalServerError, MemKVError, StoreFenced
from memkv.memory.background_thread import BackgroundThread
from memkv.memory.replies import stored_problem
from memkv.memory.transfer import Tell as TellDocuments
from memkv.store import Store
from memkv.store.rows import JobRow, KVFileRow
from memkv.store.verification import Recomputed, Scrubbed, scrub
from memkv.wire import Exported, Imported, StoreExport, StoreImport, StoreVerification, StoreVerify
from memkv.wire import StoreProblem as ProblemReply

_log = structlog.get_logger(__name__)

_IDLE_SECONDS = 60.0
_PAUSE_SECONDS = 1.0  # between two passes of the scrubber, and after a failure
_MOST_PROBLEMS = 1000  # told one by one

Tell = Callable[[int, int], None]  # done, total
Recompute = Callable[[int, bool, float, Tell], Recomputed]  # chunks, repair, until when

Work = Callable[[JobRow], dict[str, object]]  # returns what it counted


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the memory that a store is part of can do for it.

    Attributes:
        recompute: prefills so many chunks again and compares them.
        resume_starved: sees to documents that failed for want of room.
        preload: loads the chunks of files into the engine's memory, as far as there is room, where a model is
            open.
        export: writes collections to an archive.
        import_: ingests an archive; None where no model is open.
    """

    recompute: Recompute
    resume_starved: Callable[[], None]
    preload: Callable[[Sequence[KVFileRow], Tell], None]
    export: Callable[[StoreExport, TellDocuments], Exported]
    import_: Callable[[StoreImport, TellDocuments], Imported] | None = None


class _Stopped(Exception):
    """The thread was asked to stop in the middle of a job."""


class Maintenance(BackgroundThread):
    """Started by whoever opens the store for use; asked to stop, it ends soon, and puts a job back."""

    def __init__(self, store: Store, config: StoreConfig, abilities: Abilities) -> None:
        super().__init__("memkv-maintenance", wake=store.jobs.announce)
        self._store = store
        self._config = config
        self._abilities = abilities
        self._works: dict[str, Work] = {"verify": self._verify, "warm": self._warm, "export": self._export}
        if abilities.import_ is not None:
            self._works["import"] = partial(self._import, abilities.import_)
        self.scrubbed = Scrubbed()  # so far
        self._owner = f"pid {os.getpid()}"

    def verify(self, request: StoreVerify, tell: Tell) -> StoreVerification:
        """The whole check, in the caller's thread."""
        started = time.monotonic()
        deadline = started + request.max_seconds if request.max_seconds else inf
        before = self._store.upkeep.disk_bytes()
        verified = self._store.verify_until(
            deadline, full=request.full, repair=request.repair, on_progress=tell
        )
        problems, compared = verified.problems, 0
        if request.deep:
            again = self._abilities.recompute(request.deep, request.repair, deadline, tell)
            compared, problems = again.chunks, problems + again.problems
        files, size = self._store.catalog.kv_totals()
        return StoreVerification(
            full=request.full,
            kv_files=files,
            kv_bytes=size,
            found=len(problems),
            repaired=sum(problem.repaired for problem in problems),
            problems=[
                ProblemReply(kind=p.kind, name=p.name, detail=p.detail, repaired=p.repaired)
                for p in problems[:_MOST_PROBLEMS]
            ],
            recomputed=compared,
            files=verified.files,
            bytes=verified.bytes,
            files_left=verified.files_left,
            bytes_left=verified.bytes_left,
            bytes_before=before,
            bytes_after=self._store.upkeep.disk_bytes(),
            seconds=time.monotonic() - started,
        )

    def run(self) -> None:
        job: JobRow | None = None  # claimed, and not yet ended or given back
        next_turn = time.monotonic() + _IDLE_SECONDS
        while not self.stopping.is_set():
            try:
                if job is not None:
                    self._store.jobs.release(job.id)
                left = max(0.0, next_turn - time.monotonic())
                job = self._store.jobs.claim(self._owner, kinds=tuple(self._works), timeout=left)
                if job is not None:
                    self._run(job)
                    job = None
                elif time.monotonic() >= next_turn:
                    next_turn = time.monotonic() + self._idle()
            except _Stopped:
                if job is not None:
                    self._store.jobs.release(job.id)
                return
            except (StoreFenced, DatabaseDamaged) as error:
                _log.error("maintenance_ended", code=error.code, detail=error.detail, hint=error.hint)
                return
            except MemKVError as error:  # the database is busy or away
                _log.warning("maintenance_waits", code=error.code, detail=error.detail)
                self.stopping.wait(_PAUSE_SECONDS)
            except Exception:  # noqa: BLE001  # the thread's top: what nobody expected ends its job alone
                _log.exception("maintenance_failed")
                if job is not None:
                    self._fail(job, InternalServerError("the job failed for a fault of memkv's"))
                    job = None
                self.stopping.wait(_PAUSE_SECONDS)

    def _run(self, job: JobRow) -> None:
        try:
            counts = self._works[job.kind](job)
        except StoreFenced:
            raise
        except MemKVError as error:  # whoever waits for the job is told, even that the database is damaged
            self._fail(job, error)
        else:
            self._store.jobs.finish(job.id, "succeeded", counts=counts)

    def _fail(self, job: JobRow, error: MemKVError) -> None:
        self._store.jobs.finish(job.id, "failed", error=stored_problem(error))

    def _verify(self, job: JobRow) -> dict[str, object]:
        request = msgspec.convert(dict(job.arguments), StoreVerify)
        report = self.verify(request, lambda done, total: self._tell(job, "verifying", done, total))
        return {
            "verification": msgspec.to_builtins(report),
            "bytes_before": report.bytes_before,
            "bytes_after": report.bytes_after,
        }

    def _warm(self, job: JobRow) -> dict[str, object]:
        catalog, chunks = self._store.catalog, self._store.chunks
        catalog.collection_by_id(job.tenant, job.collection_id)
        before = self._store.upkeep.disk_bytes()
        rows: list[KVFileRow] = catalog.files_of(job.collection_id)
        sound: list[KVFileRow] = []
        for done, row in enumerate(rows):
            self._tell(job, "reading", done, len(rows))
            damage = chunks.check(row, full=True)
            if damage is None:
                sound.append(row)
            else:
                chunks.set_right(row, damage)
        self._tell(job, "reading", len(rows), len(rows))
        self._abilities.preload(sound, lambda done, total: self._tell(job, "loading", done, total))
        after = self._store.upkeep.disk_bytes()
        return {"chunks": len(sound), "bytes_before": before, "bytes_after": after}

    def _export(self, job: JobRow) -> dict[str, object]:
        request = msgspec.convert(dict(job.arguments), StoreExport)
        return {"exported": msgspec.to_builtins(self._abilities.export(request, self._documents_of(job)))}

    def _import(
        self, import_: Callable[[StoreImport, TellDocuments], Imported], job: JobRow
    ) -> dict[str, object]:
        request = msgspec.convert(dict(job.arguments), StoreImport)
        done = import_(request, self._documents_of(job))
        return {
            "imported": msgspec.to_builtins(done),
            "documents": done.documents,
            "bytes_before": done.bytes_before,
            "bytes_after": done.bytes_after,
        }

    def _documents_of(self, job: JobRow) -> TellDocuments:
        return lambda name, done, total: self._tell(job, f"{job.kind}ing {name}", done, total, "documents")

    def _tell(self, job: JobRow, stage: str, done: int, total: int, unit: str = "files") -> None:
        if self.stopping.is_set():
            raise _Stopped
        self._store.jobs.progress(job.id, stage=stage, done=done, total=total, unit=unit)

    def _idle(self) -> float:
        """One turn without jobs; returns the seconds until the next."""
        self._store.uses.flush()
        self._abilities.resume_starved()
        if self._config.scrub_hours == 0:
            return _IDLE_SECONDS
        seen = scrub(
            self._store.chunks,
            self._store.catalog,
            older_than=timedelta(hours=self._config.scrub_hours),
            bytes_per_second=self._config.scrub_rate_bytes,
            stop=self.stopping,
        )
        self.scrubbed.add(seen)
        if seen.damaged:
            _log.warning("scrubber_found_damage", files=seen.files, damaged=seen.damaged)
        return _PAUSE_SECONDS if seen.files else _IDLE_SECONDS
