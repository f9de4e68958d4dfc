"""The thread that reads a store through: long jobs about the store itself, and what is done without any.

When idle it writes down how often chunks were used, tries documents again that found no room, and reads block
files that nobody read for long, so that damage is found before somebody needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import inf

import msgspec
import structlog

from memkv.config import StoreConfig
from memkv.memory.job_thread import IDLE_SECONDS, PAUSE_SECONDS, JobThread, Work
from memkv.memory.transfer import Tell as TellDocuments
from memkv.store import Store
from memkv.store.rows import JobRow, KVFileRow
from memkv.store.verification import Recomputed, Scrubbed, scrub
from memkv.wire import Exported, Imported, StoreExport, StoreImport, StoreVerification, StoreVerify
from memkv.wire import StoreProblem as ProblemReply

_log = structlog.get_logger(__name__)

_MOST_PROBLEMS = 1000  # told one by one

Tell = Callable[[int, int], None]  # done, total
Recompute = Callable[[int, bool, float, Tell], Recomputed]  # chunks, repair, until when


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


class Maintenance(JobThread):
    """Started by whoever opens the store for use; asked to stop, it ends soon, and puts a job back."""

    def __init__(self, store: Store, config: StoreConfig, abilities: Abilities) -> None:
        works: dict[str, Work] = {"verify": self._verify, "warm": self._warm, "export": self._export}
        if abilities.import_ is not None:
            works["import"] = partial(self._import, abilities.import_)
        super().__init__("memkv-maintenance", store, works)
        self._config = config
        self._abilities = abilities
        self.scrubbed = Scrubbed()  # so far

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

    def _verify(self, job: JobRow) -> dict[str, object]:
        request = msgspec.convert(dict(job.arguments), StoreVerify)
        report = self.verify(request, lambda done, total: self.tell(job, "verifying", done, total))
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
            self.tell(job, "reading", done, len(rows))
            damage = chunks.check(row, full=True)
            if damage is None:
                sound.append(row)
            else:
                chunks.set_right(row, damage)
        self.tell(job, "reading", len(rows), len(rows))
        self._abilities.preload(sound, lambda done, total: self.tell(job, "loading", done, total))
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
        return lambda name, done, total: self.tell(job, f"{job.kind}ing {name}", done, total, "documents")

    def idle(self) -> float:
        self._store.uses.flush()
        self._abilities.resume_starved()
        if self._config.scrub_hours == 0:
            return IDLE_SECONDS
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
        return PAUSE_SECONDS if seen.files else IDLE_SECONDS
