"""Documents made ready: chunked, embedded, prefilled, published, committed. One thread works off the jobs.

A document is durable before its job starts. Block files are published batch by batch, and a document's chunks
appear in one transaction once all of its files are durable: a crash repeats only what was not published.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np
import structlog
from numpy.typing import NDArray

from memkv.engine.residency import ChunkRef
from memkv.errors import (
    DatabaseDamaged,
    DatabaseUnavailable,
    EngineClosed,
    FingerprintMismatch,
    InternalServerError,
    MemKVError,
    NotFoundError,
    StoreFenced,
)
from memkv.memory.collections import Collections, OpenCollection
from memkv.memory.parts import Parts
from memkv.memory.replies import stored_problem
from memkv.store.rows import ChunkRow, DocumentRow, JobRow, NewChunk
from memkv.text.chunker import TextChunk, chunk_text

_log = structlog.get_logger(__name__)

_KINDS = ("ingest", "reprefill")
_RETRY_SECONDS = 1.0
_IDLE_SECONDS = 60.0
_EMBED_TEXTS = 2  # between two steps of the engine: an answer under way waits for no more

# What torch, numpy and the text's own code raise where a document is more than they can do.
_FAULTS = (ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError)

Vectors = dict[str, NDArray[np.float32]]  # by the chunk's text


@dataclass(slots=True)
class _Counts:
    """Of one job; `memkv.wire.JobCounts` says what clients see."""

    documents: int = 0
    chunks: int = 0
    chunks_prefilled: int = 0
    chunks_reused: int = 0
    tokens_prefilled: int = 0
    kv_bytes_written: int = 0


@dataclass(frozen=True, slots=True)
class _Work:
    """One document on its way; for a `reprefill`, with the chunks that it has."""

    document: DocumentRow
    revision: int
    chunks: Sequence[TextChunk | ChunkRow]
    keys: list[str]


@dataclass(slots=True)
class _Run:
    """One job on its way.

    Attributes:
        sizes: bytes of text of each of its documents that waits. Progress is told in them: they are known
            beforehand, chunks are not.
        total: the same of all its documents.
        finished: the same of those that are seen to, whatever became of them.
        ahead: what is prefilled of those that are not.
    """

    job: JobRow
    collection: OpenCollection
    sizes: dict[str, int]
    total: int
    finished: int
    ahead: int = 0
    failed: int = 0
    counts: _Counts = field(default_factory=_Counts)


class _Stopped(Exception):
    """The thread was asked to stop between two pieces of work."""


class Ingestion:
    """The job thread. A document's failure is recorded on it, and the thread goes on."""

    def __init__(self, parts: Parts, collections: Collections) -> None:
        self._parts = parts
        self._collections = collections
        self._owner = f"pid {os.getpid()}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="memkv-ingestion", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends after the batch in hand; an unfinished job goes back to the queue."""
        self._stopping.set()
        self._parts.store.jobs.announce()
        self._thread.join()

    def _loop(self) -> None:
        job: JobRow | None = None  # claimed, and not yet ended or given back
        while not self._stopping.is_set():
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
                self._stopping.wait(_RETRY_SECONDS)

    def _run(self, job: JobRow) -> None:
        jobs, catalog = self._parts.store.jobs, self._parts.store.catalog
        try:
            collection = self._collections.open(catalog.collection_by_id(job.tenant, job.collection_id))
        except (NotFoundError, FingerprintMismatch) as error:
            jobs.finish(job.id, "failed", error=stored_problem(error))
            return
        items = jobs.items(job.tenant, job.id)
        sizes = {item.document_id: item.text_bytes for item in items if item.status in ("queued", "running")}
        total = sum(item.text_bytes for item in items)
        failed = sum(item.status == "failed" for item in items)  # before the process died
        run = _Run(job, collection, sizes, total, finished=total - sum(sizes.values()), failed=failed)
        try:
            for group in self._groups(run, list(sizes)):
                self._process(run, group)
        except (_Stopped, EngineClosed):
            jobs.release(job.id)
            return
        if jobs.is_cancelled(job.id):
            jobs.finish(job.id, "cancelled", counts=asdict(run.counts))
        elif run.failed == 0:
            jobs.finish(job.id, "succeeded", counts=asdict(run.counts))
        else:
            every = run.failed == len(items)
            jobs.finish(job.id, "failed" if every else "partial", counts=asdict(run.counts))

    def _groups(self, run: _Run, document_ids: Sequence[str]) -> Iterator[list[_Work]]:
        """Documents together until their chunks fill a prefill batch.

        One by one, and each said beforehand, where the process died of this job before: the next one then
        knows which document it was.
        """
        group: list[_Work] = []
        one_by_one = run.job.attempts > 1
        most = self._parts.config.ingest.batch_chunks
        for document_id in document_ids:
            if self._parts.store.jobs.is_cancelled(run.job.id):
                return
            self._stop_if_asked()
            if one_by_one:
                self._parts.store.jobs.start_item(run.job.id, document_id)
            work = self._chunk(run, document_id)
            if work is not None:
                group.append(work)
            if one_by_one or sum(len(work.chunks) for work in group) >= most:
                yield group
                group = []
        if group:
            yield group

    def _chunk(self, run: _Run, document_id: str) -> _Work | None:
        """None where the document was deleted while it waited, or cannot be cut."""
        catalog, row = self._parts.store.catalog, run.collection.row
        self._progress(run, "chunking")
        try:
            document = catalog.document_by_id(row.tenant, document_id)
            revision, text = catalog.document_text(row.tenant, document_id)
        except NotFoundError:
            self._finish(run, document_id, None)
            return None
        if run.job.kind == "reprefill":
            stored = catalog.chunks_of(row.tenant, document_id)
            return _Work(document, revision, stored, [chunk.input_key for chunk in stored])
        try:
            chunks = chunk_text(text, document.title, self._parts.tokenizer, row.max_chunk_tokens)
        except _FAULTS as error:
            self._fail(run, [_Work(document, revision, [], [])], _fault(error))
            return None
        return _Work(document, revision, chunks, [run.collection.key(chunk.token_ids) for chunk in chunks])

    def _process(self, run: _Run, group: Sequence[_Work]) -> None:
        """Makes a group ready; where it fails, each document alone: one does not fail its neighbours."""
        if not group:
            return
        again = run.job.kind == "reprefill"
        try:
            vectors = {} if again else self._embed(run, group)
            if again or run.collection.row.prefill == "eager":
                self._prefill(run, group)
        except (EngineClosed, DatabaseUnavailable, DatabaseDamaged, StoreFenced):
            raise  # not the documents' fault: the job stays
        except (MemKVError, *_FAULTS) as error:
            if len(group) == 1:
                self._fail(run, group, error if isinstance(error, MemKVError) else _fault(error))
            else:
                for work in group:
                    self._stop_if_asked()
                    self._process(run, [work])
            return
        for work in group:
            if again:
                self._release_unused(run, work)
                run.counts.documents += 1
                run.counts.chunks += len(work.chunks)
                self._finish(run, work.document.id, None)
            else:
                self._commit(run, work, vectors)

    def _embed(self, run: _Run, group: Sequence[_Work]) -> Vectors:
        self._progress(run, "embedding")
        texts = list(dict.fromkeys(chunk.text for work in group for chunk in work.chunks))
        vectors: Vectors = {}
        for first in range(0, len(texts), _EMBED_TEXTS):
            self._stop_if_asked()
            batch = texts[first : first + _EMBED_TEXTS]
            embed = partial(self._parts.embedder.embed, batch)
            shares_cores = self._parts.model.device == "cpu"
            found = self._parts.engine.run(embed) if shares_cores else embed()
            vectors.update(zip(batch, found, strict=True))
        return vectors

    def _prefill(self, run: _Run, group: Sequence[_Work]) -> None:
        """Makes KV for the keys that have none, and publishes it batch by batch."""
        collection, counts = run.collection, run.counts
        chunks = {key: chunk for work in group for key, chunk in zip(work.keys, work.chunks, strict=True)}
        known = self._parts.store.catalog.existing_keys(collection.row.tenant, list(chunks))
        missing = [collection.ref(key, chunk.token_ids) for key, chunk in chunks.items() if key not in known]
        counts.chunks_reused += len(chunks) - len(missing)
        group_bytes = sum(run.sizes[work.document.id] for work in group)
        size = self._parts.config.ingest.batch_chunks

        def tell(before: int, done: int, _: int = 0) -> None:
            run.ahead = group_bytes * (before + done) // len(missing)
            self._progress(run, "prefilling")

        for first in range(0, len(missing), size):
            self._stop_if_asked()
            tell(first, 0)
            refs = self._still_wanted(run, group, missing[first : first + size])
            if not refs:
                continue
            made = self._parts.engine.prefill(
                collection.prefix,
                refs,
                collection.kv,
                block_size=collection.row.block_size,
                on_progress=partial(tell, first),
            )
            collection.kv.publish(list(zip(refs, made, strict=True)))
            counts.chunks_prefilled += len(refs)
            counts.tokens_prefilled += sum(ref.num_tokens for ref in refs)
            counts.kv_bytes_written += sum(len(kv.data) for kv in made)

    def _still_wanted(self, run: _Run, group: Sequence[_Work], refs: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Those of `refs` whose document was neither deleted nor replaced meanwhile."""
        ids = [work.document.id for work in group]
        newest = self._parts.store.catalog.revisions(run.collection.row.tenant, ids)
        wanted = {key for work in group if newest.get(work.document.id) == work.revision for key in work.keys}
        return [ref for ref in refs if ref.input_key in wanted]

    def _commit(self, run: _Run, work: _Work, vectors: Vectors) -> None:
        self._progress(run, "committing")
        chunks = [
            NewChunk(
                ordinal=chunk.ordinal,
                start=chunk.start,
                end=chunk.end,
                text=chunk.text,
                label=chunk.label,
                token_ids=tuple(chunk.token_ids),
                input_key=key,
                embedding=vectors[chunk.text],
            )
            for key, chunk in zip(work.keys, work.chunks, strict=True)
        ]
        tenant = run.collection.row.tenant
        committed = self._parts.store.commit_document(tenant, work.document.id, work.revision, chunks)
        if committed.change is not None:
            self._parts.engine.drop(committed.change.released.keys)
            run.counts.documents += 1
            run.counts.chunks += len(chunks)
        else:  # deleted or replaced while it was made ready
            self._release_unused(run, work)
        self._finish(run, work.document.id, None)

    def _release_unused(self, run: _Run, work: _Work) -> None:
        """Lets go of what was published for a document that nobody refers to (any more)."""
        tenant = run.collection.row.tenant
        released = self._parts.store.chunks.release_unused(tenant, work.keys)
        self._parts.engine.drop(released.keys)

    def _fail(self, run: _Run, group: Sequence[_Work], error: MemKVError) -> None:
        tenant = run.collection.row.tenant
        for work in group:
            self._parts.store.catalog.fail_document(
                tenant, work.document.id, work.revision, stored_problem(error)
            )
            self._release_unused(run, work)
            self._finish(run, work.document.id, error)

    def _finish(self, run: _Run, document_id: str, error: MemKVError | None) -> None:
        run.finished += run.sizes[document_id]
        run.ahead = max(0, run.ahead - run.sizes[document_id])
        if error is None:
            self._parts.store.jobs.finish_item(run.job.id, document_id, "succeeded")
        else:
            run.failed += 1
            self._parts.store.jobs.finish_item(run.job.id, document_id, "failed", stored_problem(error))
        self._progress(run, "committing")

    def _progress(self, run: _Run, stage: str) -> None:
        self._parts.store.jobs.progress(
            run.job.id, stage=stage, done=run.finished + run.ahead, total=run.total, unit="bytes"
        )

    def _stop_if_asked(self) -> None:
        if self._stopping.is_set():
            raise _Stopped


def _fault(error: BaseException) -> InternalServerError:
    _log.error("ingest_failed", exc_info=error)
    return InternalServerError(f"ingest failed: {type(error).__name__}")
