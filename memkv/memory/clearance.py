"""The thread whose jobs make room or keep what is there: gc, evict, compact, purge, snapshot.

It is not the one that reads a store through: an operator whose disk is full does not wait for that. All of it
may be done twice, so that a job that a kill interrupted is done again at the next opening.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict

import msgspec

from memkv.memory.job_thread import JobThread
from memkv.memory.replies import change_reply
from memkv.store import Store
from memkv.store.catalog_jobs import SNAPSHOT
from memkv.store.rows import JobRow
from memkv.store.upkeep import Removed, Tell
from memkv.wire import StoreEvict, StoreGC


class Clearance(JobThread):
    """Args:
    drop: lets an engine's pool forget keys whose files were removed.
    """

    def __init__(self, store: Store, drop: Callable[[Iterable[str]], None]) -> None:
        works = {
            "gc": self._gc,
            "evict": self._evict,
            "compact": self._compact,
            "purge": self._purge,
            SNAPSHOT: self._snapshot,
        }
        super().__init__("memkv-clearance", store, works)
        self._drop = drop

    def _gc(self, job: JobRow) -> dict[str, object]:
        request = msgspec.convert(dict(job.arguments), StoreGC)
        on_progress = self._telling(job, "collecting garbage")
        removed = self._store.upkeep.collect_garbage(force=request.force, on_progress=on_progress)
        self._drop(removed.released)
        return _counts(removed)

    def _evict(self, job: JobRow) -> dict[str, object]:
        request = msgspec.convert(dict(job.arguments), StoreEvict)
        catalog = self._store.catalog
        collection = catalog.collection_by_id(job.tenant, job.collection_id) if job.collection_id else None
        on_progress = self._telling(job, "evicting")
        return _counts(
            self._store.upkeep.evict(collection, to_bytes=request.to_bytes, on_progress=on_progress)
        )

    def _compact(self, job: JobRow) -> dict[str, object]:
        self.tell(job, "compacting", 0, 0, "")
        return _counts(self._store.upkeep.compact())

    def _purge(self, job: JobRow) -> dict[str, object]:
        return _counts(self._store.upkeep.purge_quarantine(on_progress=self._telling(job, "purging")))

    def _snapshot(self, job: JobRow) -> dict[str, object]:
        made = self._store.snapshots.create(
            str(job.arguments["snapshot"]), on_progress=self._telling(job, "copying")
        )
        return {"snapshot": asdict(made)}

    def _telling(self, job: JobRow, stage: str) -> Tell:
        return lambda done, total: self.tell(job, stage, done, total)


def _counts(removed: Removed) -> dict[str, object]:
    change = change_reply(removed, dry_run=False)
    return {
        "change": msgspec.to_builtins(change),
        "bytes_before": change.bytes_before,
        "bytes_after": change.bytes_after,
    }
