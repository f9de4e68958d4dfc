"""One job about documents on its way: how far it is, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import msgspec

from memkv.errors import MemKVError
from memkv.memory.replies import stored_problem
from memkv.store.catalog_job_ends import CANCELLED
from memkv.store.jobs import Jobs
from memkv.store.rows import JobItem, JobRow


@dataclass(slots=True)
class Counts:
    """Of one job; `memkv.wire.JobCounts` says what clients see."""

    documents: int = 0
    chunks: int = 0
    chunks_prefilled: int = 0
    chunks_reused: int = 0
    tokens_prefilled: int = 0
    kv_bytes_written: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass(slots=True, eq=False)
class Ahead:
    """What is prefilled of some documents before they are finished.

    Attributes:
        num_bytes: of text of those that are not finished.
        num_chunks, num_done: to prefill, and prefilled.
    """

    num_bytes: int
    num_chunks: int = 0
    num_done: int = 0


class JobRun:
    """Progress is told in bytes of text: they are known beforehand, chunks are not.

    Attributes:
        waiting: ids of the documents to see to.
        counts: for one thread alone, as everything but `prefilled` is.
    """

    def __init__(self, jobs: Jobs, job: JobRow, items: Sequence[JobItem]) -> None:
        self.job = job
        self.counts = msgspec.convert(dict(job.counts), Counts)  # of an earlier try, where there was one
        self._jobs = jobs
        self._sizes = {
            item.document_id: item.text_bytes for item in items if item.status in ("queued", "running")
        }
        self.waiting = list(self._sizes)
        self._num_items = len(items)
        self._num_left = len(self.waiting)
        self._num_failed = sum(item.status == "failed" for item in items)  # before the process died
        self._total = sum(item.text_bytes for item in items)
        self._lock = threading.Lock()  # guards what follows
        self._finished = self._total - sum(self._sizes.values())  # seen to, whatever became of them
        self._ahead: set[Ahead] = set()

    @property
    def makes_anew(self) -> bool:
        """Whether it prefills the chunks that documents have, rather than to cut them."""
        return self.job.kind == "reprefill"

    def tell(self, stage: str) -> None:
        with self._lock:
            self._tell(stage)

    def begin(self, document_ids: Sequence[str]) -> Ahead:
        ahead = Ahead(sum(self._sizes[document_id] for document_id in document_ids))
        with self._lock:
            self._ahead.add(ahead)
        return ahead

    def prefilled(self, ahead: Ahead, num_chunks: int) -> None:
        """From any thread."""
        with self._lock:
            ahead.num_done += num_chunks
            self._tell("prefilling")

    def end(self, ahead: Ahead) -> None:
        """What is left of these documents is not ahead any more."""
        with self._lock:
            self._ahead.discard(ahead)

    def finish_document(self, document_id: str, ahead: Ahead | None, error: MemKVError | None) -> None:
        self._num_left -= 1
        with self._lock:
            self._finished += self._sizes[document_id]
            if ahead is not None:
                ahead.num_bytes -= self._sizes[document_id]
        if error is None:
            self._jobs.finish_item(self.job.id, document_id, "succeeded")
        else:
            self._num_failed += 1
            self._jobs.finish_item(self.job.id, document_id, "failed", stored_problem(error))
        self.tell("committing")

    def finish(self, disk_bytes: Callable[[], int]) -> None:
        """`disk_bytes` is asked where the job's arguments tell what they were before."""
        before = self.job.arguments.get("bytes_before")
        if isinstance(before, int):
            self.counts.bytes_before, self.counts.bytes_after = before, disk_bytes()
        counts = asdict(self.counts)
        if self._num_left:  # it was cancelled
            self._jobs.finish(self.job.id, "cancelled", counts=counts, error=CANCELLED)
        elif self._num_failed == 0:
            self._jobs.finish(self.job.id, "succeeded", counts=counts)
        else:
            every = self._num_failed == self._num_items
            self._jobs.finish(self.job.id, "failed" if every else "partial", counts=counts)

    def _tell(self, stage: str) -> None:
        prefilled = sum(
            each.num_bytes * each.num_done // each.num_chunks for each in self._ahead if each.num_chunks
        )
        done = self._finished + prefilled
        self._jobs.progress(self.job.id, stage=stage, done=done, total=self._total, unit="bytes")
