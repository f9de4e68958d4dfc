"""The thread that works off the jobs about documents: cuts them, and has them made ready.

A document is durable before its job starts. Block files are published batch by batch, and a document's chunks
appear in one transaction once all of its files are durable: a crash repeats only what was not published.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import structlog

from memkv.errors import (
    DatabaseDamaged,
    EngineClosed,
    FingerprintMismatch,
    InternalServerError,
    MemKVError,
    NotFoundError,
    StoreFenced,
    UnprocessableDocumentError,
)
from memkv.memory.background_thread import BackgroundThread
from memkv.memory.collections import Collections, OpenCollection
from memkv.memory.job_run import JobRun
from memkv.memory.job_thread import JobCancelled
from memkv.memory.parts import Parts
from memkv.memory.preparation import Preparation, Work
from memkv.memory.replies import stored_problem
from memkv.store.rows import JobRow

_log = structlog.get_logger(__name__)

_KINDS = ("ingest", "reprefill")
_RETRY_SECONDS = 1.0
_IDLE_SECONDS = 60.0


class _Stopped(Exception):
    """The thread was asked to stop between two pieces of work."""


class Ingestion(BackgroundThread):
    """The job thread. A document's failure is recorded on it, and the thread goes on.

    Asked to stop, it ends after the batch in hand; an unfinished job goes back to the queue. A cancelled one
    ends there, too: what is ready stays.
    """

    def __init__(self, parts: Parts, collections: Collections) -> None:
        super().__init__("memkv-ingestion", wake=parts.store.jobs.announce)
        self._parts = parts
        self._collections = collections
        self._owner = f"pid {os.getpid()}"

    def run(self) -> None:
        job: JobRow | None = None  # claimed, and not yet ended or given back
        while not self.stopping.is_set():
            try:
                if job is not None:
                    self._parts.store.jobs.release(job.id)
                job = self._parts.store.jobs.claim(self._owner, kinds=_KINDS, timeout=_IDLE_SECONDS)
                if job is not None:
                    self._run(job)
                    job = None
            except (StoreFenced, DatabaseDamaged) as error:
                _log.error("ingestion_ended", code=error.code, detail=error.detail, hint=error.hint)
                return
            except MemKVError as error:  # the database is busy or away
                _log.warning("ingestion_waits", code=error.code, detail=error.detail)
                self.stopping.wait(_RETRY_SECONDS)

    def _run(self, job: JobRow) -> None:
        jobs, catalog = self._parts.store.jobs, self._parts.store.catalog
        try:
            collection = self._collections.open(catalog.collection_by_id(job.tenant, job.collection_id))
        except (NotFoundError, FingerprintMismatch) as error:
            jobs.finish(job.id, "failed", error=stored_problem(error))
            return
        run = JobRun(jobs, job, jobs.items(job.tenant, job.id))
        one_by_one = job.attempts > 1  # the process died of it before: which document it was must be known
        try:
            stop_if_asked = partial(self._stop_if_asked, job.id)
            with Preparation(self._parts, collection, run, stop_if_asked) as preparation:
                try:
                    for works in self._groups(collection, run, preparation, one_by_one=one_by_one):
                        preparation.add(works)
                        if one_by_one:
                            preparation.finish()
                    preparation.finish()
                except JobCancelled:
                    preparation.abandon()
        except (_Stopped, EngineClosed):
            jobs.release(job.id)
        else:
            run.finish(self._parts.store.upkeep.disk_bytes)

    def _groups(
        self, collection: OpenCollection, run: JobRun, preparation: Preparation, *, one_by_one: bool
    ) -> Iterator[list[Work]]:
        """Documents together until their chunks fill a prefill batch; or one by one, each said beforehand."""
        group: list[Work] = []
        most = self._parts.config.ingest.batch_chunks
        for document_id in run.waiting:
            self._stop_if_asked(run.job.id)
            if one_by_one:
                self._parts.store.jobs.start_item(run.job.id, document_id)
            work = self._cut(collection, run, preparation, document_id)
            if work is not None:
                group.append(work)
            if group and (one_by_one or sum(len(work.chunks) for work in group) >= most):
                yield group
                group = []
        if group:
            yield group

    def _cut(
        self, collection: OpenCollection, run: JobRun, preparation: Preparation, document_id: str
    ) -> Work | None:
        """None where the document was deleted while it waited, or cannot be cut."""
        catalog, row = self._parts.store.catalog, collection.row
        run.tell("chunking")
        try:
            document = catalog.document_by_id(row.tenant, document_id)
            revision, text = catalog.document_text(row.tenant, document_id)
        except NotFoundError:
            run.finish_document(document_id, None, None)
            return None
        if run.makes_anew:
            stored = catalog.chunks_of(row.tenant, document_id)
            return Work(document, revision, stored, [chunk.input_key for chunk in stored])
        try:
            chunks = self._parts.cutter.cut(text, document.title, row.max_chunk_tokens)
        except (UnprocessableDocumentError, InternalServerError) as error:
            preparation.fail(Work(document, revision, [], []), error)
            return None
        return Work(document, revision, chunks, [collection.key(chunk.token_ids) for chunk in chunks])

    def _stop_if_asked(self, job_id: str) -> None:
        if self.stopping.is_set():
            raise _Stopped
        if self._parts.store.jobs.is_cancelled(job_id):
            raise JobCancelled
