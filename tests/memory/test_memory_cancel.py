"""Jobs that are cancelled in the middle leave nothing half done, and can be tried again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from held_engine import HeldEngine

from memkv.errors import ConflictError, JobNotFound, ModelError
from memkv.memory import Memory
from memkv.wire import (
    CollectionCreate,
    DocumentCreate,
    Job,
    PageRequest,
    StoreEvict,
    StoreGC,
    StoreImport,
    StoreVerify,
)

OpenMemory = Callable[..., Memory]


def cancelled(memory: Memory, engine: HeldEngine, job: Job | None) -> Job:
    """Cancels the job while the engine is held; returns it as it ended."""
    assert job is not None
    assert engine.reached.wait(30)
    asked = memory.cancel_job(job.id)
    assert (asked.status, asked.cancel_requested) == ("running", True)
    engine.open.set()
    return memory.wait_job(job.id, 60)


def document(name: str, entries: int = 4) -> DocumentCreate:
    text = "\n\n".join(f"{name} {i}: the gauge read {i * 37 % 100} on day {i}." for i in range(entries))
    return DocumentCreate(text=text, external_id=name)


def opened(open_memory: OpenMemory) -> Memory:
    memory = open_memory(ingest__batch_chunks=1)
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    memory.ingest("c", [document("first")], wait=60)  # and the prefix is there
    return memory


def states(memory: Memory) -> dict[str, str]:
    found = memory.list_documents("c", PageRequest(limit=100)).data
    return {d.external_id: d.error.code if d.error else d.status for d in found}


def check_store(memory: Memory) -> None:
    """Nothing half done: no file that nothing refers to, no document that waits."""
    assert memory.verify_store().problems == []
    assert memory.get_collection("c").by_status["pending"] == 0
    memory._parts.engine.check_integrity()


def test_a_cancelled_ingest_keeps_what_is_ready_and_the_rest_can_be_tried_again(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opened(open_memory)
    names = [f"d{number}" for number in range(8)]
    engine = HeldEngine(memory, monkeypatch, at_batch=6)
    accepted = memory.ingest("c", [document(name) for name in names])
    ended = cancelled(memory, engine, accepted.job)
    assert (ended.status, ended.errors[-1].code, ended.errors[-1].status) == ("cancelled", "cancelled", 409)
    after = states(memory)
    ready = [name for name in names if after[name] == "ready"]
    assert 0 < len(ready) < len(names)
    assert ready == names[: len(ready)], "in the order in which they came"
    assert {after[name] for name in names[len(ready) :]} == {"cancelled"}
    assert ended.counts.documents == len(ready)
    check_store(memory)
    with pytest.raises(ConflictError, match="ended already"):
        memory.cancel_job(ended.id)

    again = memory.retry_job(ended.id)
    assert (again.id, again.status in ("queued", "running", "succeeded")) == (ended.id, True)
    done = memory.wait_job(ended.id, 60)
    assert (done.status, done.errors, done.counts.documents) == ("succeeded", [], len(names))
    assert set(states(memory).values()) == {"ready"}
    check_store(memory)
    with pytest.raises(ConflictError, match="nothing of the job is left"):
        memory.retry_job(ended.id)


def test_one_long_document_is_let_go_of_in_its_middle(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opened(open_memory)
    files = memory.store_stats().kv_files
    engine = HeldEngine(memory, monkeypatch, at_batch=5)
    ended = cancelled(memory, engine, memory.ingest("c", [document("long", 80)]).job)
    assert (ended.status, states(memory)) == ("cancelled", {"first": "ready", "long": "cancelled"})
    assert memory.store_stats().kv_files == files, "what was published of it is still there"
    check_store(memory)
    memory.retry_job(ended.id)
    assert memory.wait_job(ended.id, 60).status == "succeeded"
    check_store(memory)


def test_a_job_that_waits_is_cancelled_at_once(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opened(open_memory)
    engine = HeldEngine(memory, monkeypatch, at_batch=1)
    running = memory.ingest("c", [document("running")]).job
    assert running is not None
    assert engine.reached.wait(30)
    waiting = memory.ingest("c", [document("waiting")]).job
    assert waiting is not None
    assert memory.cancel_job(waiting.id).status == "cancelled"
    assert states(memory)["waiting"] == "cancelled"
    engine.open.set()
    assert memory.wait_job(running.id, 60).status == "succeeded"
    with pytest.raises(JobNotFound):
        memory.cancel_job("job_" + "0" * 32)


def test_only_what_failed_is_made_again(open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = opened(open_memory)
    engine = memory._parts.engine
    prefill = engine.prefill

    def failing(prefix: Any, refs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        if any(b"bad" in bytes(memory._parts.tokenizer.decode(ref.token_ids), "utf-8") for ref in refs):
            raise ModelError("it cannot")
        return prefill(prefix, refs, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "prefill", failing)
        job = memory.ingest("c", [document("good"), document("bad")], wait=60).job
    assert job is not None
    assert (job.status, states(memory)["bad"]) == ("partial", ModelError.code)
    assert 0 < job.counts.chunks_prefilled == job.counts.chunks
    memory.retry_job(job.id)
    done = memory.wait_job(job.id, 60)
    assert (done.status, done.failed, done.errors) == ("succeeded", [], [])
    assert done.counts.documents == 2
    assert job.counts.chunks < done.counts.chunks_prefilled == done.counts.chunks, (
        "the good one was made again"
    )


@pytest.mark.parametrize("kind", ["verify", "evict", "import"])
def test_jobs_about_the_store_end_between_two_pieces(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    memory = opened(open_memory)
    archives = Path(memory.store_stats().data_dir) / "archives"
    if kind == "import":
        memory.ingest("c", [document(f"d{number}") for number in range(3)], wait=60)
        archives.mkdir(mode=0o700)
        memory.export(archives / "a.tar")
        memory.delete_collection("c")
    reached, go_on = threading.Event(), threading.Event()
    is_cancelled = memory._store.jobs.is_cancelled

    def held(job_id: str) -> bool:
        if memory._store.jobs.get("default", job_id).kind == kind:
            reached.set()
            assert go_on.wait(30)
        return is_cancelled(job_id)

    starts: dict[str, Callable[[], Any]] = {
        "verify": lambda: memory.admin.verify(StoreVerify()),
        "evict": lambda: memory.admin.evict(StoreEvict()),
        "import": lambda: memory.admin.import_(StoreImport(archive="a.tar")),
    }
    with monkeypatch.context() as patched:
        patched.setattr(memory._store.jobs, "is_cancelled", held)
        work = starts[kind]()
        assert reached.wait(30)
        assert memory.cancel_job(work.job.id).status == "running"
        go_on.set()
        ended = memory.wait_job(work.job.id, 60)
    assert (ended.status, [problem.code for problem in ended.errors]) == ("cancelled", ["cancelled"])
    for status in ("queued", "running"):
        for left in memory.list_jobs(PageRequest(limit=100), status=status).data:
            assert memory.wait_job(left.id, 60).status == "cancelled", "the import's own job"
    check_store(memory)
    memory.retry_job(ended.id)
    assert memory.wait_job(ended.id, 60).status == "succeeded"
    assert set(states(memory).values()) == {"ready"}


def test_a_cancelled_job_does_not_come_back_after_a_restart(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opened(open_memory)
    monkeypatch.setattr(memory._clearance, "_run", lambda job: memory._clearance.stopping.wait(30))
    work = memory.admin.gc(StoreGC())
    assert work.job is not None
    while memory.get_job(work.job.id).status == "queued":
        pass
    memory.cancel_job(work.job.id)
    memory.close()
    again = open_memory()
    assert again.get_job(work.job.id).status == "cancelled"
