"""What documents cost, what fits, what is kept; and documents that found no room, once there is some."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memkv.admission import is_possible, uses_to_keep
from memkv.errors import BadRequestError, ConfigError, InsufficientStorageError
from memkv.memory import Memory
from memkv.wire import (
    CollectionCreate,
    CollectionPatch,
    DocumentCreate,
    Estimate,
    Generation,
    PageRequest,
    QueryRequest,
)

OpenMemory = Callable[..., Memory]


def text(seed: str, entries: int = 12) -> str:
    return "\n\n".join(
        f"Entry {i} of {seed}: the gauge read {i * 37 % 100} on day {i}." for i in range(entries)
    )


def document(seed: str, entries: int = 12) -> DocumentCreate:
    return DocumentCreate(text=text(seed, entries), external_id=seed)


def ingest(memory: Memory, seed: str) -> str:
    """The document's status."""
    return memory.ingest("c", [document(seed)], wait=60).documents[0].status


def ask(memory: Memory) -> int:
    """Chunks that had to be prefilled for an answer."""
    request = QueryRequest(
        query="What did the gauge read?", collection="c", policy="map", generation=Generation(max_tokens=2)
    )
    return memory.query(request).reuse.healed_chunks


def kv_files(memory: Memory) -> int:
    return memory.store_stats().kv_files


@pytest.fixture
def memory(open_memory: OpenMemory) -> Iterator[Memory]:
    opened = open_memory()
    opened.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    yield opened
    opened._parts.engine.check_integrity()


def test_an_estimate_is_what_the_ingest_then_costs(memory: Memory) -> None:
    estimate = memory.estimate("c", [document("a"), document("b")])
    assert estimate.collection_exists
    assert estimate.fits
    assert estimate.prefill_seconds > 0
    assert estimate.keep_after_uses is None or estimate.keep_after_uses >= 2
    assert kv_files(memory) == 0, "an estimate keeps nothing"
    prefix = memory.estimate("c", []).kv_bytes
    assert prefix == 0
    accepted = memory.ingest("c", [document("a"), document("b")], wait=60)
    assert accepted.job is not None
    counts = accepted.job.counts
    assert (estimate.new_chunks, estimate.new_tokens) == (counts.chunks_prefilled, counts.tokens_prefilled)
    files = memory.admin.files(PageRequest(limit=100)).data
    prefix_tokens = memory.get_collection("c").prefix_tokens
    [prefix_file] = [file for file in files if file.tokens == prefix_tokens and file.chunks == 1][:1]
    assert estimate.kv_bytes == sum(file.bytes for file in files) - prefix_file.bytes
    again = memory.estimate("c", [document("a")])
    assert (again.new_chunks, again.kv_bytes, again.keep_after_uses) == (0, 0, None)
    assert again.chunks > 0


def test_an_estimate_needs_no_collection(memory: Memory) -> None:
    estimate: Estimate = memory.estimate("nothing-yet", [document("a")])
    assert not estimate.collection_exists
    assert estimate.new_chunks > 0
    assert [c.name for c in memory.list_collections(PageRequest()).data] == ["c"]


def test_what_passes_a_cap_is_refused_before_anything_is_kept(memory: Memory) -> None:
    need = memory.estimate("c", [document("a")]).kv_bytes
    memory.update_collection("c", CollectionPatch(max_kv_bytes=need + need // 2 + 200_000))
    assert ingest(memory, "a") == "ready"
    used = memory.store_stats().kv_bytes
    with pytest.raises(InsufficientStorageError) as caught:
        ingest(memory, "b")
    assert caught.value.status == 507
    assert "memkv collections update" in caught.value.hint
    assert memory.store_stats().kv_bytes == used
    assert memory.get_collection("c").counts.documents == 1
    assert memory.estimate("c", [document("b")]).fits is False
    assert ingest(memory, "a") == "ready", "what is there already costs nothing"
    memory.forget("c", "a")
    assert ingest(memory, "b") == "ready"


def test_a_document_that_found_no_room_is_made_ready_when_there_is_some(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cap is reached while it is prefilled: it fails as a whole, leaves nothing, and is tried again."""
    need = memory.estimate("c", [document("a")]).kv_bytes
    assert ingest(memory, "a") == "ready"
    used = memory.store_stats().kv_bytes
    monkeypatch.setattr(memory._estimation, "require_room", lambda *_: None)
    memory.update_collection("c", CollectionPatch(max_kv_bytes=used + need // 2))
    assert ingest(memory, "b") == "failed"
    found = memory.get_document("c", "b")
    assert found.error is not None
    assert found.error.code == InsufficientStorageError.code
    assert memory.store_stats().kv_bytes == used, "KV of a document that failed was left"
    assert memory.get_document("c", "a").status == "ready"
    memory._maintenance.idle()
    assert memory.get_document("c", "b").status == "failed", "there is no more room than before"
    memory.update_collection("c", CollectionPatch(max_kv_bytes=used + 10 * need))
    memory._maintenance.idle()
    [job] = memory.list_jobs(PageRequest(limit=1, order="desc")).data
    assert memory.wait_job(job.id, 60).status == "succeeded"
    assert memory.get_document("c", "b").status == "ready"


def test_a_full_disk_is_waited_out(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "posix_fallocate", full)
        assert ingest(memory, "a") == "failed"
    memory._maintenance.idle()
    [job] = memory.list_jobs(PageRequest(limit=1, order="desc")).data
    assert memory.wait_job(job.id, 60).status == "succeeded"
    assert memory.get_document("c", "a").status == "ready"


def test_kv_is_kept_after_so_many_uses(open_memory: OpenMemory) -> None:
    def restarted() -> Memory:
        """Nothing is resident: what is not on disk is computed."""
        for opened in memories:
            opened.close()
        memories.append(open_memory())
        return memories[-1]

    memories: list[Memory] = []
    memory = restarted()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64, prefill="after_3_uses"))
    memory.ingest("c", [document("a", entries=4)], wait=60)
    assert kv_files(memory) == 0, "cold text costs no disk"
    for use in (1, 2, 3):
        memory = restarted()
        assert ask(memory) > 0
        kept = use == 3
        memory.close()
        memory = restarted()
        files = [file for file in memory.admin.files(PageRequest(limit=100)).data if file.uses]
        assert bool(files) is kept, f"after {use} uses"
    assert ask(memory) == 0
    assert memory.get_collection("c").prefill == "after_3_uses"


@pytest.mark.parametrize("word", ["eager", "on_first_use", "after_2_uses", "after_999_uses"])
def test_what_prefill_may_say(word: str, open_memory: OpenMemory) -> None:
    assert is_possible(word)
    assert uses_to_keep(word) == {"after_2_uses": 2, "after_999_uses": 999}.get(word, 0)
    assert open_memory(ingest__prefill=word)._config.ingest.prefill == word


@pytest.mark.parametrize("word", ["", "lazy", "after_1_uses", "after_1000_uses", "after_02_uses", "eager\n"])
def test_what_prefill_may_not_say(word: str, memory: Memory, open_memory: OpenMemory) -> None:
    assert not is_possible(word)
    with pytest.raises(BadRequestError):
        memory.create_collection(CollectionCreate(name="d", prefill=word))
    with pytest.raises(BadRequestError):
        memory.update_collection("c", CollectionPatch(prefill=word))
    with pytest.raises(ConfigError):
        open_memory(ingest__prefill=word)


def test_a_collection_is_changed(memory: Memory) -> None:
    changed = memory.update_collection("c", CollectionPatch(description="d", prefill="on_first_use"))
    assert (changed.description, changed.prefill, changed.max_kv_bytes) == ("d", "on_first_use", 0)
    assert memory.update_collection("c", CollectionPatch()) == changed
    assert ingest(memory, "a") == "ready"
    assert kv_files(memory) == 0
    assert Path(memory.store_stats().data_dir).is_dir()
