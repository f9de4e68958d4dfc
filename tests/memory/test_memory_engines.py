"""Two engines over one store, by configuration: what one made is there for the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from conftest import LIGHTHOUSE, RAILWAY, OpenMemory

from memkv.wire import CollectionCreate, DocumentCreate, Generation, QueryRequest, QueryResponse, Reuse


def test_engines_on_two_devices_answer_as_one_does(open_memory: OpenMemory) -> None:
    """Ingested, asked from many threads at once; the same answers as one engine gives alone."""
    answers = []
    for device in ("cpu,cpu", "cpu"):  # the second run opens what the first has stored
        memory = open_memory(model__device=device, kv__dtype="float32")
        memory.create_collection(CollectionCreate(name="both"), exist_ok=True)
        documents = [DocumentCreate(text=text, external_id=text[:9]) for text in (LIGHTHOUSE, RAILWAY)]
        accepted = memory.ingest("both", documents, wait=60.0)
        assert accepted.job is None or accepted.job.status == "succeeded"

        def ask(number: int, memory=memory) -> QueryResponse:  # type: ignore[no-untyped-def]
            reuse: Reuse = "off" if number % 3 == 2 else "strict"
            request = QueryRequest(
                query=f"What is number {number // 3}?",
                collection="both",
                policy="map",
                reuse=reuse,
                min_score=-1.0,
                generation=Generation(max_tokens=8),
            )
            return memory.query(request)

        with ThreadPoolExecutor(8) as threads:
            responses = list(threads.map(ask, range(24)))
        assert all(response.reuse.healed_chunks == 0 for response in responses)
        answers.append([response.answer for response in responses])
        lanes = memory._parts.engine.stats().lanes
        assert len(lanes) == len(device.split(","))
        assert all(lane.counters.steps for lane in lanes)
        memory._parts.engine.check_integrity()
        memory.close()
    assert answers[0] == answers[1]
