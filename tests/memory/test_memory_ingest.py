"""Documents in: once, durable, and cheap to send again."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from memkv.errors import (
    BadRequestError,
    CollectionExists,
    CollectionNotFound,
    ConflictError,
    DocumentNotFound,
    EmptyDocument,
    FingerprintMismatch,
    PayloadTooLargeError,
    StoreLocked,
    UnprocessableDocumentError,
    UnsupportedMediaTypeError,
)
from memkv.memory import Memory
from memkv.memory.collections import StoredKV
from memkv.store.jobs import Jobs
from memkv.text.cutter import CutLimits
from memkv.wire import (
    Accepted,
    CollectionCreate,
    DocumentCreate,
    DocumentUpload,
    JobCounts,
    PageRequest,
    QueryRequest,
    SearchRequest,
)


def paragraphs(count: int, *, seed: str = "") -> list[str]:
    return [
        f"Paragraph {i}{seed} of the register. On day {i * 7 % 365} the keeper counted {i * 13 % 97} ships. "
        f"The wind came from quarter {i % 8}, and the barometer stood at {940 + i * 11 % 90} hectopascal."
        for i in range(count)
    ]


def ingest(memory: Memory, text: str, external_id: str = "doc", collection: str = "c") -> Accepted:
    return memory.ingest(collection, [DocumentCreate(text=text, external_id=external_id)], wait=120)


def counts(accepted: Accepted) -> JobCounts:
    assert accepted.job is not None
    assert accepted.job.status == "succeeded", accepted.job
    return accepted.job.counts


def test_an_unchanged_document_costs_no_prefill(open_memory) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    text = "\n\n".join(paragraphs(6))
    first = ingest(memory, text)
    assert first.documents[0].outcome == "created"
    assert first.documents[0].status == "ready"
    assert counts(first).chunks_prefilled == counts(first).chunks > 3
    again = ingest(memory, text)
    assert again.documents[0].outcome == "unchanged"
    assert again.documents[0].id == first.documents[0].id
    assert again.job is None
    other = ingest(memory, text, external_id="copy")
    assert other.documents[0].outcome == "created"
    assert counts(other).chunks_prefilled == 0, "the same chunks of the same tenant share their KV"


def test_progress_moves_with_the_chunks_of_one_large_document(open_memory, monkeypatch) -> None:
    memory = open_memory(ingest__batch_chunks=4)
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    told = []
    report = Jobs.progress

    def progress(jobs: Jobs, job_id: str, **values) -> None:
        told.append(values)
        report(jobs, job_id, **values)

    monkeypatch.setattr(Jobs, "progress", progress)
    text = "\n\n".join(paragraphs(20))
    job = ingest(memory, text).job
    assert job is not None
    assert job.counts.chunks_prefilled >= 12, "several batches"
    assert {(values["total"], values["unit"]) for values in told} == {(len(text), "bytes")}
    done = [values["done"] for values in told]
    assert done == sorted(done)
    prefilling = {values["done"] for values in told if values["stage"] == "prefilling"}
    assert len(prefilling) > job.counts.chunks_prefilled, "it stood still while chunks were prefilled"
    assert (job.progress.done, job.progress.total, job.progress.unit) == (len(text), len(text), "bytes")


def test_editing_one_paragraph_of_a_hundred_chunks_prefills_at_most_three(open_memory) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=96))
    texts = paragraphs(160)
    first = counts(ingest(memory, "\n\n".join(texts)))
    assert first.chunks >= 100
    for place in (0, 77, 159):
        texts[place] = f"An altered paragraph stands at place {place}, and it is quite unlike the others."
        changed = counts(ingest(memory, "\n\n".join(texts)))
        assert 1 <= changed.chunks_prefilled <= 3
        assert changed.chunks_reused + changed.chunks_prefilled == changed.chunks
    found = memory.search(SearchRequest(query="An altered paragraph stands at place 77", collection="c"))
    assert "place 77" in found.data[0].text


def test_prefill_on_first_use_makes_a_document_searchable_without_kv(open_memory) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64, prefill="on_first_use"))
    done = counts(ingest(memory, "\n\n".join(paragraphs(3))))
    assert done.chunks_prefilled == 0
    assert memory.get_collection("c").counts.kv_files == 0
    question = QueryRequest(query="How many ships on day 7?", collection="c", policy="map", top_k=2)
    first = memory.query(question)
    assert first.reuse.healed_chunks == 3, "two chunks and the prefix"
    assert memory.get_collection("c").counts.kv_files == 3
    second = memory.query(question)
    assert second.reuse.healed_chunks == 0
    assert second.usage.prefilled_tokens < first.usage.prefilled_tokens


def test_an_update_serves_the_old_text_until_the_new_one_is_ready(open_memory) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    ingest(memory, "The bell at the north pier rings at noon.")
    updated = ingest(memory, "The bell at the north pier rings at midnight.")
    assert updated.documents[0].outcome == "updated"
    found = memory.search(SearchRequest(query="When does the bell ring?", collection="c"))
    assert [hit.text for hit in found.data] == ["The bell at the north pier rings at midnight."]
    assert memory.get_collection("c").counts.documents == 1


def test_a_forgotten_document_is_gone_at_once_and_its_files_with_it(open_memory, tmp_path: Path) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    ingest(memory, "The canary's name is Zanzibar.", "canary")
    ingest(memory, "Slate is split along its grain.", "slate")
    memory.forget("c", "canary")
    assert all(
        "Zanzibar" not in hit.text
        for hit in memory.search(SearchRequest(query="Zanzibar", collection="c")).data
    )
    with pytest.raises(DocumentNotFound):
        memory.get_document("c", "canary")
    with pytest.raises(DocumentNotFound):
        memory.forget("c", "canary")
    files = list((tmp_path / "data" / "blocks").rglob("*.kv"))
    assert len(files) == memory.store_stats().kv_files == 2, "the prefix's and the other document's"


def test_collections_are_made_once_and_found_by_name(open_memory) -> None:
    memory = open_memory()
    made = memory.create_collection(CollectionCreate(name="c", metadata={"team": "north"}))
    with pytest.raises(CollectionExists):
        memory.create_collection(CollectionCreate(name="c"))
    again = memory.create_collection(CollectionCreate(name="c", metadata={"team": "north"}), exist_ok=True)
    assert again.id == made.id
    with pytest.raises(ConflictError, match="metadata"):
        memory.create_collection(CollectionCreate(name="c", metadata={"team": "south"}), exist_ok=True)
    memory.create_collection(CollectionCreate(name="d"))
    page = memory.list_collections(PageRequest(limit=1))
    assert [c.name for c in page.data] == ["c"]
    assert page.has_more
    rest = memory.list_collections(PageRequest(limit=1, after=page.last_id))
    assert [c.name for c in rest.data] == ["d"]
    assert not rest.has_more
    memory.delete_collection("d")
    with pytest.raises(CollectionNotFound):
        memory.get_collection("d")


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (DocumentCreate(text=""), EmptyDocument),
        (DocumentCreate(text=" \n\t\u200b"), EmptyDocument),
        (DocumentCreate(text="a\x00b"), UnprocessableDocumentError),
        (DocumentCreate(text="a\udc80b"), UnprocessableDocumentError),
        (DocumentCreate(text="x" * 2001), PayloadTooLargeError),
        (DocumentUpload(data=b"\xff\xfe\xfd\x00\x80", filename="a.txt"), UnprocessableDocumentError),
        (DocumentUpload(data=b"%PDF-1.7", filename="a.pdf"), UnsupportedMediaTypeError),
        (DocumentUpload(data=b"PK\x03\x04", filename="a.txt"), UnsupportedMediaTypeError),
        (DocumentCreate(text="a", external_id="x" * 600), BadRequestError),
        (DocumentCreate(text="a", title="t\ud800"), BadRequestError),
        (DocumentCreate(text="a", metadata={"n": 2**70}), BadRequestError),
    ],
)
def test_a_document_that_cannot_be_kept_is_refused_whole(open_memory, document, error) -> None:
    memory = open_memory(ingest__max_document_bytes=2000)
    memory.create_collection(CollectionCreate(name="c"))
    good = DocumentCreate(text="A good neighbour.", external_id="good")
    with pytest.raises(error) as caught:
        memory.ingest("c", [good, document], wait=10)
    assert caught.value.detail
    assert memory.list_documents("c", PageRequest()).data == [], "all or none"
    assert ingest(memory, "A good neighbour.", "good").documents[0].status == "ready"


def test_unknown_names_are_errors_with_a_hint(open_memory) -> None:
    memory = open_memory()
    with pytest.raises(CollectionNotFound) as caught:
        memory.ingest("nowhere", [DocumentCreate(text="a")])
    assert caught.value.hint
    with pytest.raises(CollectionNotFound):
        memory.search(SearchRequest(query="a", collection="nowhere"))


def test_many_threads_that_send_one_document_make_one(open_memory) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    outcomes: list[str] = []

    def send() -> None:
        outcomes.append(ingest(memory, "The same text from everyone.").documents[0].outcome)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["created"] + ["unchanged"] * 7
    assert memory.get_collection("c").counts.documents == 1


def test_a_second_memory_on_the_same_store_is_refused(open_memory) -> None:
    open_memory()
    with pytest.raises(StoreLocked, match="process") as caught:
        open_memory()
    assert caught.value.hint


def test_another_model_never_uses_the_collections_kv(open_memory, tiny_model_dir) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    ingest(memory, "The pier is made of oak.")
    memory.close()
    for flags, field in (
        ({"model__model": str(tiny_model_dir("qwen2"))}, "weights_digest"),
        ({"kv__dtype": "float32"}, "kv_dtype"),
    ):
        other = open_memory(**flags)
        named_here = other.get_collection("c").model == other.info().model.name
        assert named_here == (field != "weights_digest"), "a listing must not claim this model made it"
        with pytest.raises(FingerprintMismatch, match=field) as caught:
            other.query(QueryRequest(query="What is the pier made of?", collection="c"))
        assert caught.value.hint
        other.close()
    back = open_memory()
    answer = back.query(QueryRequest(query="What is the pier made of?", collection="c", policy="map"))
    assert answer.reuse.healed_chunks == 0


def test_an_interrupted_job_goes_on_after_the_next_start(open_memory) -> None:
    memory = open_memory(ingest__batch_chunks=1)
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    documents = [DocumentCreate(text=text, external_id=str(i)) for i, text in enumerate(paragraphs(40))]
    accepted = memory.ingest("c", documents)
    assert accepted.job is not None
    memory.close()
    again = open_memory()
    job = again.wait_job(accepted.job.id, 120)
    assert job.status == "succeeded"
    assert again.get_collection("c").by_status == {"pending": 0, "ready": 40, "failed": 0}


def test_a_document_forgotten_while_it_is_prefilled_leaves_nothing_on_disk(open_memory, monkeypatch) -> None:
    memory = open_memory(ingest__batch_chunks=2)
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    publish = StoredKV.publish
    published: list[str] = []

    def publish_then_forget(kv: StoredKV, items) -> None:
        publish(kv, items)
        published.extend(ref.input_key for ref, _ in items)
        if len(published) in (4, 5):
            memory.forget("c", "doc")

    monkeypatch.setattr(StoredKV, "publish", publish_then_forget)
    accepted = memory.ingest("c", [DocumentCreate(text="\n\n".join(paragraphs(40)), external_id="doc")])
    assert accepted.job is not None
    job = memory.wait_job(accepted.job.id, timeout=120)
    assert len(published) <= 5 + 3 * 2, "what was not under way was prefilled all the same"
    assert (job.counts.documents, job.counts.chunks) == (0, 0)
    assert memory.store_stats().kv_files <= 1, "the prefix alone"
    again = ingest(memory, "A text that comes later stands in this collection all by itself.")
    assert counts(again).chunks == 1


def test_kv_that_is_healed_for_a_forgotten_chunk_is_not_kept(open_memory, monkeypatch) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64, prefill="on_first_use"))
    ingest(memory, "\n\n".join(paragraphs(8)))
    publish = StoredKV.publish

    def forget_then_publish(kv: StoredKV, items) -> None:
        with suppress(DocumentNotFound):
            memory.forget("c", "doc")
        publish(kv, items)

    monkeypatch.setattr(StoredKV, "publish", forget_then_publish)
    question = QueryRequest(query="How many ships?", collection="c", policy="map", min_score=-1.0)
    assert memory.query(question).reuse.healed_chunks > 1
    memory.close()
    monkeypatch.undo()
    assert open_memory().store_stats().kv_files <= 1, "the prefix alone"


@pytest.mark.parametrize("stage", ["hang", "prefill"])
def test_one_poison_document_does_not_fail_its_neighbours(open_memory, monkeypatch, stage) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    if stage == "hang":
        cutter = memory._parts.cutter
        cut = cutter.cut
        monkeypatch.setattr(cutter, "_limits", CutLimits(seconds=1.0))

        def hang_at_poison(text: str, *arguments):
            if "poison" in text:
                os.kill(cutter.pid, signal.SIGSTOP)
            return cut(text, *arguments)

        monkeypatch.setattr(cutter, "cut", hang_at_poison)
    else:
        prefill, decode = memory._parts.engine.prefill, memory._parts.tokenizer

        def prefill_all_but_poison(prefix, refs, *arguments, **options):
            texts = [decode.decode(ref.token_ids) for ref in refs]
            if any("poison" in text for text in texts):
                raise RuntimeError("a kernel's bounds check")
            return prefill(prefix, refs, *arguments, **options)

        monkeypatch.setattr(memory._parts.engine, "prefill", prefill_all_but_poison)
    documents = [DocumentCreate(text=f"This is the {n} text.", external_id=n) for n in ("a", "poison", "b")]
    accepted = memory.ingest("c", documents, wait=60)
    assert accepted.job is not None
    assert accepted.job.status == "partial"
    assert {d.external_id: d.status for d in accepted.documents} == {
        "a": "ready",
        "poison": "failed",
        "b": "ready",
    }
    failed = memory.get_document("c", "poison")
    assert failed.error is not None
    assert [(item.document_id, item.problem) for item in accepted.job.failed] == [(failed.id, failed.error)]
    assert failed.error.code == ("unprocessable_document" if stage == "hang" else "internal_error")
    if stage == "hang":
        assert failed.error.detail == "the document cannot be cut: nothing comes of it in 6 s"
    assert memory.ready().status == "ready"
    assert memory.verify_store().found == 0, "KV of the document that failed was left"


@pytest.mark.parametrize("prefill", ["eager", "after_9_uses"])
def test_what_is_forgotten_leaves_the_pool_whether_or_not_a_file_held_it(open_memory, prefill: str) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", prefill=prefill))
    memory.ingest("c", [DocumentCreate(text="The lamp burns oil. " * 9, external_id="d")], wait=60)
    memory.query(QueryRequest(query="Lamp?", collection="c", min_score=-1.0, policy="exact"))

    def kept_blocks() -> int:
        return sum(lane.kept_blocks for lane in memory._parts.engine.stats().lanes)

    assert kept_blocks() > 0
    memory.forget("c", "d")
    deadline = time.monotonic() + 10
    while kept_blocks():  # the engine drops them between two steps
        assert time.monotonic() < deadline, "what was forgotten stays in the pool"
        time.sleep(0.02)
