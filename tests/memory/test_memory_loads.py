"""KV on its way before it is waited for: when retrieval has answered, and when a memory is opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memkv.engine.engine import Engine
from memkv.memory import Memory
from memkv.wire import CollectionCreate, DocumentCreate, Generation, QueryRequest, StoreCollection

NUM_CHUNKS = 6


@pytest.fixture
def cold(open_memory: Callable[..., Memory]) -> Memory:
    """A memory that was just opened: six chunks with KV on disk, none of it in the pool."""
    six_chunks(open_memory).close()
    return open_memory()


def six_chunks(open_memory: Callable[..., Memory]) -> Memory:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=96))
    sent = [
        DocumentCreate(
            text=f"Note {number}: boat {number * 7} came in.",
            external_id=f"d{number}",
            metadata={"number": number},
        )
        for number in range(NUM_CHUNKS)
    ]
    job = memory.ingest("c", sent, wait=60).job
    assert job is not None and job.counts.chunks_prefilled == NUM_CHUNKS
    return memory


def loads(memory: Memory) -> int:
    return int(memory._store.chunks.stats().get("hits", 0))


def question(**fields: object) -> QueryRequest:
    values: dict[str, object] = {
        "top_k": NUM_CHUNKS,
        "min_score": -1.0,
        "generation": Generation(max_tokens=2),
    }
    return QueryRequest(query="Which boat came in?", collection="c", **{**values, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("map", 1 + NUM_CHUNKS), ("select:0.3", 1 + NUM_CHUNKS), ("exact", 2), ("order", 2)],
)
def test_what_the_policy_maps_is_loaded_before_the_question_is_submitted(
    cold: Memory, monkeypatch: pytest.MonkeyPatch, policy: str, expected: int
) -> None:
    generate = cold._parts.engine.generate

    def generate_when_loaded(*arguments: object) -> object:
        deadline = time.monotonic() + 10
        while loads(cold) < expected:
            assert time.monotonic() < deadline, "nothing is loaded before the engine is asked"
            time.sleep(0.005)
        return generate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cold._parts.engine, "generate", generate_when_loaded)
    answer = cold.query(question(policy=policy))
    assert answer.reuse.healed_chunks == 0
    assert loads(cold) == expected, "something was read twice, or for nothing"
    cold._parts.engine.check_integrity()


def test_without_reuse_nothing_is_loaded(cold: Memory) -> None:
    cold.query(question(policy="map", reuse="off"))
    assert loads(cold) == 0


# Warm-up: what was mapped most, when a memory is opened


@pytest.fixture
def used(open_memory: Callable[..., Memory]) -> Callable[..., Memory]:
    """Opens a memory with the chunks of `cold`, of which number 2 was mapped thrice, and 4 once."""
    memory = six_chunks(open_memory)
    for number in (2, 2, 4, 2):
        memory.query(question(filter={"number": number}, policy="map"))
    memory.close()
    return open_memory


def settled(memory: Memory) -> None:
    deadline = time.monotonic() + 10
    while memory._warm_up.is_alive or not memory._parts.engine.is_idle():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_mapped_most_is_in_the_pool_after_an_opening(used: Callable[..., Memory]) -> None:
    memory = used()
    assert memory.ready().status == "ready"
    settled(memory)
    assert loads(memory) == 1 + 2, "the prefix, and what was mapped"
    for number in (2, 4):
        answer = memory.query(question(filter={"number": number}, policy="map", reuse="strict"))
        assert answer.reuse.healed_chunks == 0
    assert loads(memory) == 1 + 2, "it was read again"


def test_warm_up_takes_no_more_than_its_share_of_the_pool_and_the_most_used_first(
    used: Callable[..., Memory],
) -> None:
    memory = used(engine__pool_bytes="1M", engine__warm_share=0.0)
    settled(memory)
    assert loads(memory) == 0
    [row] = memory._store.catalog.all_collections()
    collection = memory._collections.open(row)
    largest = max(file.num_tokens for file in memory._store.catalog.most_used_files(10))
    share = collection.layout.bytes_for(largest) * 1.5 / 1e6
    memory.close()
    memory = used(engine__pool_bytes="1M", engine__warm_share=share)
    settled(memory)
    assert loads(memory) == 1 + 1
    memory.query(question(filter={"number": 2}, policy="map"))
    assert loads(memory) == 1 + 1, "it was another one that was loaded"


def test_the_shares_of_several_engines_are_filled_together(used: Callable[..., Memory]) -> None:
    memory = used(engine__warm_share=0.0)
    [row] = memory._store.catalog.all_collections()
    collection = memory._collections.open(row)
    largest = max(file.num_tokens for file in memory._store.catalog.most_used_files(10))
    share = collection.layout.bytes_for(largest) * 0.75 / 1e6  # of one pool: not even one chunk
    memory.close()
    memory = used(model__device="cpu,cpu", engine__pool_bytes="1M", engine__warm_share=share)
    settled(memory)
    assert loads(memory) == 1 + 1


def test_what_the_pools_share_has_no_room_for_is_warmed_up_in_host_memory(
    used: Callable[..., Memory],
) -> None:
    memory = used(engine__pool_bytes="1M", engine__host_bytes="100M", engine__warm_share=0.005)
    settled(memory)
    assert loads(memory) == 1 + 2
    [lane] = memory._parts.engine.stats().lanes
    assert lane.host_blocks.cached > lane.blocks.cached == 0
    for number in (2, 4):
        memory.query(question(filter={"number": number}, policy="map", reuse="strict"))
    assert loads(memory) == 1 + 2


def test_warm_up_waits_while_the_engine_has_something_to_do(
    used: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = threading.Event()
    busy.set()
    idle = Engine.is_idle
    monkeypatch.setattr(Engine, "is_idle", lambda engine: not busy.is_set() and idle(engine))
    memory = used()
    answer = memory.query(question(filter={"number": 0}, policy="map"))
    time.sleep(0.2)
    assert answer.usage.cached_tokens and loads(memory) == 1 + 1, "only what the question needed"
    busy.clear()
    settled(memory)
    assert loads(memory) == 1 + 1 + 2


def test_warm_up_passes_over_what_is_damaged_or_of_another_model(
    used: Callable[..., Memory], tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    other = used(model__model=str(tiny_model_dir("qwen2")))
    settled(other)
    assert loads(other) == 0 and other.ready().status == "ready"
    other.close()
    for file in (tmp_path / "data" / "blocks").rglob("*.kv"):
        file.chmod(0o600)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        file.chmod(0o400)
    memory = used()
    settled(memory)
    assert memory._store.chunks.stats()["damaged_digest"] == 1 + 2, "found before a question needed it"
    answer = memory.query(question(filter={"number": 2}, policy="map"))
    assert answer.reuse.healed_chunks == 2, "the prefix and the chunk"


def test_a_collection_is_loaded_when_that_is_asked_for(cold: Memory) -> None:
    work = cold.admin.warm(StoreCollection(collection="c"))
    assert work.job is not None
    job = cold.wait_job(work.job.id, 60)
    assert (job.status, job.counts.chunks) == ("succeeded", 1 + NUM_CHUNKS)
    assert loads(cold) == 1 + NUM_CHUNKS, "the job says that it is done before it is"
    answer = cold.query(question(policy="map", reuse="strict"))
    assert answer.usage.cached_tokens and loads(cold) == 1 + NUM_CHUNKS


def test_what_is_asked_for_takes_no_more_than_its_share(
    open_memory: Callable[..., Memory],
) -> None:
    six_chunks(open_memory).close()
    memory = open_memory(engine__warm_share=0.0)
    work = memory.admin.warm(StoreCollection(collection="c"))
    assert work.job is not None
    assert memory.wait_job(work.job.id, 60).status == "succeeded"
    assert loads(memory) == 0


def test_a_memory_closes_in_the_middle_of_its_warm_up(
    used: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "is_idle", lambda engine: False)
    memory = used()
    started = time.monotonic()
    memory.close()
    assert time.monotonic() - started < 5.0
    assert not memory._warm_up.is_alive
