"""What a memory says of its engine: where the time of answers went, and what is in which memory."""

from __future__ import annotations

import pytest
from conftest import LIGHTHOUSE, OpenMemory

from memkv.wire import CollectionCreate, DocumentCreate, Generation, QueryRequest


def test_the_time_of_every_stage_is_counted(open_memory: OpenMemory) -> None:
    memory = open_memory(engine__host_bytes="10M")
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    memory.ingest("c", [DocumentCreate(text=LIGHTHOUSE, external_id="lighthouse")], wait=60)
    request = QueryRequest(
        query="When was the lamp lit?",
        collection="c",
        policy="select:0.3",
        min_score=-1.0,
        generation=Generation(max_tokens=4),
    )
    memory.close()
    memory = open_memory(engine__host_bytes="10M")
    timings = memory.query(request).timings
    found = {metric.name: metric.samples for metric in memory.metrics()}
    for stage in ("queue", "load", "look", "prefill"):
        seconds = getattr(timings, f"{stage}_ms") / 1e3
        assert found[f"memkv_engine_{stage}_seconds"][""] == pytest.approx(seconds)
        assert seconds > 0.0 or stage == "load", "what was loaded beside the queue took no time of its own"
    assert found["memkv_retrieve_seconds"][""] == pytest.approx(timings.retrieve_ms / 1e3)
    assert found["memkv_engine_decode_seconds"][""] > 0.0
    for name in ("source_loaded_bytes", "source_load_seconds", "looked_tokens"):
        assert found[f"memkv_engine_{name}"][""] > 0
    host = found["memkv_host_pool_blocks"]
    (lane,) = memory._parts.engine.stats().lanes
    assert host["cached"] > 0 and sum(host.values()) == lane.host_blocks.total
