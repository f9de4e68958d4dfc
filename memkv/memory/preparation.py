"""Documents of one job made ready: embedded, prefilled, published, committed.

    add      embed ─► what has no KV, batch by batch ─► a worker: engine.prefill ─► files, rows
    retire   the oldest batch has ended; the last one of its documents: they are committed, in order

While a worker writes a batch the engine computes the next one, of the same documents or of later ones. A
document's chunks appear in one transaction once all of its files are durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import structlog
from numpy.typing import NDArray

from memkv.engine.residency import ChunkRef
from memkv.errors import (
    DatabaseDamaged,
    DatabaseUnavailable,
    EngineClosed,
    InternalServerError,
    MemKVError,
    StoreFenced,
)
from memkv.memory.collections import OpenCollection
from memkv.memory.job_run import Ahead, JobRun
from memkv.memory.parts import Parts
from memkv.memory.replies import stored_problem
from memkv.store.rows import ChunkRow, DocumentRow, NewChunk
from memkv.text.chunker import TextChunk

_log = structlog.get_logger(__name__)

_TEXTS = 32  # embedded at once
_TEXTS_BETWEEN_STEPS = 2  # where the engine computes on the same cores: an answer under way waits for no more
_BATCHES = 3  # under way: one is computed, one is written, and the next one waits for the engine

# What torch, numpy and the text's own code raise where a document is more than they can do.
_FAULTS = (ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError)
_NOT_THE_DOCUMENTS = (EngineClosed, DatabaseUnavailable, DatabaseDamaged, StoreFenced)  # the job stays

Vectors = dict[str, NDArray[np.float32]]  # by the chunk's text


@dataclass(frozen=True, slots=True)
class Work:
    """One document on its way; for a `reprefill`, with the chunks that it has."""

    document: DocumentRow
    revision: int
    chunks: Sequence[TextChunk | ChunkRow]
    keys: list[str]


@dataclass(slots=True, eq=False)
class _Group:
    """Documents on their way together.

    Attributes:
        is_submitted: every batch of theirs is under way, or has ended.
        num_batches: that are under way.
        num_reused: chunks that had KV, or whose KV was on its way.
        made: keys of chunks whose batches have ended.
    """

    works: Sequence[Work]
    ahead: Ahead
    vectors: Vectors = field(default_factory=dict)
    is_submitted: bool = False
    num_batches: int = 0
    num_reused: int = 0
    made: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks that a worker computes and publishes; its result: the bytes of their KV."""

    group: _Group
    refs: list[ChunkRef]
    result: Future[int]


class _Failed(Exception):
    """Some document under way cannot be made ready."""

    def __init__(self, error: MemKVError) -> None:
        self.error = error


class Preparation:
    """For one thread. Leaving it as a context manager waits for the batches under way.

    No more than `_BATCHES` batches have KV in memory. Where one fails, each document under way is made ready
    alone: one does not fail its neighbours.

    Args:
        stop_if_asked: raises where the work shall end; also called from workers.
    """

    def __init__(
        self, parts: Parts, collection: OpenCollection, run: JobRun, stop_if_asked: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._collection = collection
        self._run = run
        self._stop_if_asked = stop_if_asked
        self._workers = ThreadPoolExecutor(_BATCHES, thread_name_prefix="memkv-prefill")
        self._groups: deque[_Group] = deque()
        self._batches: deque[_Batch] = deque()
        self._made: set[str] = set()  # by batches of documents that are begun with again

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.shutdown(cancel_futures=True)

    def add(self, works: Sequence[Work]) -> None:
        """Begins with documents, and ends with earlier ones as far as they are ready."""
        try:
            self._begin(works)
        except _Failed as failed:
            self._each_alone(failed.error)

    def finish(self) -> None:
        """Ends with all that were added."""
        try:
            while self._batches:
                self._retire()
        except _Failed as failed:
            self._each_alone(failed.error)

    def abandon(self) -> None:
        """Ends with the documents of which everything is made, and lets go of what is made of the others."""
        wait([batch.result for batch in self._batches])
        for batch in self._batches:
            if batch.result.exception() is None:
                self._count(batch)
                batch.group.num_batches -= 1
        self._batches.clear()
        self._commit_complete()
        while self._groups:
            group = self._groups.popleft()
            for work in group.works:
                self._release_unused(work)
            self._run.end(group.ahead)
        self._release(self._made)

    def fail(self, work: Work, error: MemKVError) -> None:
        """Records that a document cannot be made ready."""
        catalog, tenant = self._parts.store.catalog, self._collection.row.tenant
        catalog.fail_document(tenant, work.document.id, work.revision, stored_problem(error))
        self._release_unused(work)
        self._run.finish_document(work.document.id, None, error)

    def _each_alone(self, error: MemKVError) -> None:
        wait([batch.result for batch in self._batches])
        for batch in self._batches:
            if batch.result.exception() is None:
                self._count(batch)
        self._batches.clear()
        works = [work for group in self._groups for work in group.works]
        for group in self._groups:
            self._made |= group.made
            self._run.end(group.ahead)
        self._groups.clear()
        if len(works) == 1:
            self.fail(works[0], error)
            return
        for work in works:
            self.add([work])
            self.finish()

    def _begin(self, works: Sequence[Work]) -> None:
        group = _Group(works, self._run.begin([work.document.id for work in works]))
        self._groups.append(group)
        with _documents_fault():
            if not self._run.makes_anew:
                group.vectors = self._embed(works)
            missing, group.num_reused = self._missing(works)
        group.ahead.num_chunks = len(missing)
        size = self._parts.config.ingest.batch_chunks
        for first in range(0, len(missing), size):
            while self._batches and (len(self._batches) == _BATCHES or self._batches[0].result.done()):
                self._retire()
            self._stop_if_asked()
            refs = self._still_wanted(works, missing[first : first + size])
            if refs:
                self._run.prefilled(group.ahead, 0)
                group.num_batches += 1
                self._batches.append(_Batch(group, refs, self._workers.submit(self._make, group, refs)))
        group.is_submitted = True
        self._commit_complete()

    def _make(self, group: _Group, refs: list[ChunkRef]) -> int:
        """In a worker: KV of these chunks made and published."""

        def tell(done: int, _: int) -> None:
            if done == 1:  # a batch with nothing computed yet is given up, one in hand is finished
                self._stop_if_asked()
            self._run.prefilled(group.ahead, 1)

        collection = self._collection
        made = self._parts.engine.prefill(
            collection.prefix,
            refs,
            collection.kv,
            block_size=collection.row.block_size,
            on_progress=tell,
        )
        collection.kv.publish(list(zip(refs, made, strict=True)))
        return sum(len(kv.data) for kv in made)

    def _retire(self) -> None:
        """Waits for the oldest batch."""
        batch = self._batches.popleft()
        with _documents_fault():
            batch.result.result()
        self._count(batch)
        batch.group.num_batches -= 1
        self._commit_complete()

    def _count(self, batch: _Batch) -> None:
        counts = self._run.counts
        counts.chunks_prefilled += len(batch.refs)
        counts.tokens_prefilled += sum(ref.num_tokens for ref in batch.refs)
        counts.kv_bytes_written += batch.result.result()
        batch.group.made |= {ref.input_key for ref in batch.refs}

    def _commit_complete(self) -> None:
        """Ends with the first groups as far as nothing of theirs is under way."""
        while self._groups and self._groups[0].is_submitted and not self._groups[0].num_batches:
            group = self._groups.popleft()
            self._run.counts.chunks_reused += group.num_reused
            for work in group.works:
                if self._run.makes_anew:
                    self._release_unused(work)
                    self._run.counts.documents += 1
                    self._run.counts.chunks += len(work.chunks)
                else:
                    self._commit(work, group.vectors)
                self._run.finish_document(work.document.id, group.ahead, None)
            self._run.end(group.ahead)

    def _embed(self, works: Sequence[Work]) -> Vectors:
        self._run.tell("embedding")
        texts = list(dict.fromkeys(chunk.text for work in works for chunk in work.chunks))
        known = self._parts.known_vectors
        vectors: Vectors = {text: known.pop(text) for text in texts if text in known}
        texts = [text for text in texts if text not in vectors]
        shares_cores = self._parts.model.device == "cpu"
        size = _TEXTS_BETWEEN_STEPS if shares_cores else _TEXTS
        for first in range(0, len(texts), size):
            self._stop_if_asked()
            batch = texts[first : first + size]
            embed = partial(self._parts.embedder.embed, batch)
            found = self._parts.engine.run(embed) if shares_cores else embed()
            vectors.update(zip(batch, found, strict=True))
        return vectors

    def _missing(self, works: Sequence[Work]) -> tuple[list[ChunkRef], int]:
        """The chunks to prefill: those that have no KV, and whose KV is not on its way; and how many have."""
        row = self._collection.row
        if not self._run.makes_anew and row.prefill != "eager":
            return [], 0
        chunks = {key: chunk for work in works for key, chunk in zip(work.keys, work.chunks, strict=True)}
        known = self._parts.store.catalog.existing_keys(row.tenant, list(chunks))
        known |= {ref.input_key for batch in self._batches for ref in batch.refs}
        missing = [
            self._collection.ref(key, chunk.token_ids) for key, chunk in chunks.items() if key not in known
        ]
        own = self._made & known & chunks.keys()  # by an earlier try
        self._made -= own
        return missing, len(chunks) - len(missing) - len(own)

    def _still_wanted(self, works: Sequence[Work], refs: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Those of `refs` whose document was neither deleted nor replaced meanwhile."""
        ids = [work.document.id for work in works]
        newest = self._parts.store.catalog.revisions(self._collection.row.tenant, ids)
        wanted = {key for work in works if newest.get(work.document.id) == work.revision for key in work.keys}
        return [ref for ref in refs if ref.input_key in wanted]

    def _commit(self, work: Work, vectors: Vectors) -> None:
        self._run.tell("committing")
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
        tenant = self._collection.row.tenant
        committed = self._parts.store.commit_document(tenant, work.document.id, work.revision, chunks)
        if committed.change is not None:
            self._parts.engine.drop(committed.change.released.keys)
            self._run.counts.documents += 1
            self._run.counts.chunks += len(chunks)
        else:  # deleted or replaced while it was made ready
            self._release_unused(work)

    def _release_unused(self, work: Work) -> None:
        """Lets go of what was published for a document that nobody refers to (any more).

        What a document that is still under way may need is let go of with that one.
        """
        others = {
            key for group in self._groups for each in group.works if each is not work for key in each.keys
        }
        self._release(key for key in work.keys if key not in others)

    def _release(self, keys: Iterable[str]) -> None:
        released = self._parts.store.chunks.release_unused(self._collection.row.tenant, list(keys))
        self._parts.engine.drop(released.keys)


def document_error(error: Exception) -> MemKVError:
    """What a document failed with, as it is stored."""
    if isinstance(error, MemKVError):
        return error
    _log.error("ingest_failed", exc_info=error)
    return InternalServerError(f"ingest failed: {type(error).__name__}")


@contextmanager
def _documents_fault() -> Iterator[None]:
    """Tells what a document may cause from what ends the job. Raises `_Failed`."""
    try:
        yield
    except _NOT_THE_DOCUMENTS:
        raise
    except (MemKVError, *_FAULTS) as error:
        raise _Failed(document_error(error)) from error
