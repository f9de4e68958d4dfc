"""An ingest computes while it writes: with a slow engine and a slow store, neither waits for the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from memkv.errors import InsufficientStorageError
from memkv.memory import Memory
from memkv.memory.collections import StoredKV
from memkv.wire import CollectionCreate, DocumentCreate, Job

SECONDS = 0.15  # that the engine and the store take for a batch
BATCHES = 8


class Slowed:
    """The engine and the store of a memory, each slow; what is under way in them, and when."""

    def __init__(self, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: dict[str, list[tuple[float, float]]] = {"prefill": [], "publish": []}
        self.published: list[list[str]] = []
        self.most_chunks_in_memory = 0
        self.refuse: Callable[[Sequence[str]], bool] = lambda keys: False
        self._in_memory = 0
        self._lock = threading.Lock()
        self._device = threading.Lock()  # one batch at a time, as an engine has it
        engine, publish = memory._parts.engine, StoredKV.publish
        prefill = engine.prefill

        def slow_prefill(prefix: Any, refs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
            with self._device, self._span("prefill"):
                time.sleep(SECONDS)
                made = prefill(prefix, refs, *arguments, **options)
            with self._lock:
                self._in_memory += len(refs)
                self.most_chunks_in_memory = max(self.most_chunks_in_memory, self._in_memory)
            return made

        def slow_publish(kv: StoredKV, items: Any) -> None:
            keys = [ref.input_key for ref, _ in items]
            try:
                with self._span("publish"):
                    time.sleep(SECONDS)
                    if self.refuse(keys):
                        raise InsufficientStorageError("full")
                    publish(kv, items)
                    self.published.append(keys)
            finally:
                with self._lock:
                    self._in_memory -= len(items)

        monkeypatch.setattr(engine, "prefill", slow_prefill)
        monkeypatch.setattr(StoredKV, "publish", slow_publish)

    @contextmanager
    def _span(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.spans[what].append((started, time.monotonic()))

    def overlapping_seconds(self) -> float:
        """In which the engine computed and the store wrote."""
        return sum(
            max(0.0, min(ended, end) - max(started, start))
            for started, ended in self.spans["prefill"]
            for start, end in self.spans["publish"]
        )


def texts(count: int) -> list[str]:
    return [
        f"Note {number} says that boat {number * 7} came in at {number % 24} o'clock."
        for number in range(count)
    ]


def ingest(memory: Memory, documents: list[DocumentCreate]) -> Job:
    job = memory.ingest("c", documents, wait=60).job
    assert job is not None
    return job


def slowed_memory(
    open_memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, size: int
) -> tuple[Memory, Slowed]:
    """With a collection whose prefix is there already, and so many chunks in a batch."""
    memory = open_memory(ingest__batch_chunks=size)
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=96))
    ingest(memory, [DocumentCreate(text="The first document.", external_id="first of all")])
    return memory, Slowed(memory, monkeypatch)


def documents(count: int) -> list[DocumentCreate]:
    """Of one chunk each."""
    return [DocumentCreate(text=text, external_id=f"d{n}") for n, text in enumerate(texts(count))]


@pytest.mark.parametrize("large", [False, True])
def test_batches_are_written_while_later_ones_are_computed(open_memory, monkeypatch, large: bool) -> None:
    memory, slowed = slowed_memory(open_memory, monkeypatch, 2)
    sent = documents(2 * BATCHES)
    if large:
        sent = [DocumentCreate(text="\n\n".join(texts(2 * BATCHES)), external_id="d")]
    started = time.monotonic()
    job = ingest(memory, sent)
    seconds = time.monotonic() - started
    assert job.status == "succeeded"
    batches = len(slowed.published)
    assert batches >= BATCHES and job.counts.chunks_prefilled == sum(map(len, slowed.published))
    in_turns = sum(ended - started for spans in slowed.spans.values() for started, ended in spans)
    assert slowed.overlapping_seconds() > 0.5 * SECONDS * batches
    assert seconds < 0.8 * in_turns
    assert 2 <= slowed.most_chunks_in_memory <= 3 * 2, "batches pile up in memory"
    assert memory.verify_store().found == 0


def test_a_batch_that_cannot_be_written_fails_its_document_and_no_neighbour(open_memory, monkeypatch) -> None:
    memory, slowed = slowed_memory(open_memory, monkeypatch, 2)
    refused: list[str] = []

    def refuse(keys: Sequence[str]) -> bool:
        if len(slowed.published) == 3 and not refused:
            refused.append(keys[0])
        return bool(refused) and refused[0] in keys

    slowed.refuse = refuse
    job = ingest(memory, documents(16))
    assert (job.status, job.counts.documents) == ("partial", 15)
    assert job.counts.chunks_reused == 0, "what this job itself had made counts as found"
    assert job.counts.chunks_prefilled == 15
    states = memory.get_collection("c").by_status
    assert states == {"pending": 0, "ready": 16, "failed": 1}
    assert memory.verify_store().found == 0, (
        "KV of the document that failed was left, or a neighbour's is gone"
    )
    assert memory.store_stats().kv_files == 1 + 16, "the prefix's, and one for each document that is ready"


def test_a_chunk_of_two_documents_under_way_is_made_once_and_outlives_the_one_that_is_forgotten(
    open_memory, monkeypatch
) -> None:
    memory, slowed = slowed_memory(open_memory, monkeypatch, 1)
    publish = StoredKV.publish

    def publish_then_forget(kv: StoredKV, items: Any) -> None:
        publish(kv, items)
        if len(slowed.published) == 1:
            memory.forget("c", "first")

    monkeypatch.setattr(StoredKV, "publish", publish_then_forget)
    same = "The bell at the north pier rings at noon."
    job = ingest(memory, [DocumentCreate(text=same, external_id=name) for name in ("first", "second")])
    assert (job.status, job.counts.documents) == ("succeeded", 1)
    assert [len(keys) for keys in slowed.published] == [1]
    assert memory.store_stats().kv_files == 3, (
        "the prefix's, that of the document before, and the one of the chunk"
    )
    assert memory.verify_store().found == 0


def test_a_memory_that_is_closed_gives_up_batches_with_nothing_computed(open_memory, monkeypatch) -> None:
    memory, slowed = slowed_memory(open_memory, monkeypatch, 1)
    accepted = memory.ingest("c", documents(40))
    assert accepted.job is not None
    deadline = time.monotonic() + 30
    while not slowed.published:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    memory.close()
    assert len(slowed.published) <= 4, "it went on after it was closed"
    monkeypatch.undo()
    again = open_memory()
    job = again.wait_job(accepted.job.id, 60)
    assert job.status == "succeeded"
    assert job.counts.chunks_prefilled == 40 - len(slowed.published), "what was published is not made again"
