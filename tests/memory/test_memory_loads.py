"""KV on its way before it is waited for: when retrieval has answered."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from memkv.memory import Memory
from memkv.wire import CollectionCreate, DocumentCreate, Generation, QueryRequest

NUM_CHUNKS = 6


@pytest.fixture
def cold(open_memory: Callable[..., Memory]) -> Memory:
    """A memory that was just opened: six chunks with KV on disk, none of it in the pool."""
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=96))
    sent = [
        DocumentCreate(text=f"Note {number}: boat {number * 7} came in.", external_id=f"d{number}")
        for number in range(NUM_CHUNKS)
    ]
    job = memory.ingest("c", sent, wait=60).job
    assert job is not None and job.counts.chunks_prefilled == NUM_CHUNKS
    memory.close()
    return open_memory()


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
