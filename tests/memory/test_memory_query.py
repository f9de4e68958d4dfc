"""Answers out: grounded, cited, and the same however much was reused exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from memkv.errors import BadRequestError, ContextTooLong, FilterError
from memkv.memory import Memory
from memkv.wire import (
    CollectionCreate,
    DocumentCreate,
    Generation,
    OutputDelta,
    QueryCompleted,
    QueryRequest,
    SearchRequest,
)

QUARRY = "What do the trains carry from the quarry?"
LIGHT = "When was the Skerry lighthouse lit for the first time?"


def ask(memory: Memory, query: str = QUARRY, **fields):
    fields.setdefault("generation", Generation(max_tokens=16))
    return memory.query(QueryRequest(query=query, collection="library", **fields))


def test_an_answer_cites_the_document_it_came_from(smol_memory: Memory) -> None:
    answer = ask(smol_memory)
    assert "slate" in answer.answer
    assert answer.citations
    for citation in answer.citations:
        assert answer.answer[citation.start : citation.end] == citation.text
        for source in citation.sources:
            chunk = next(c for c in answer.chunks if c.chunk_id == source.chunk_id)
            assert 0 <= source.quote.start < source.quote.end <= len(chunk.text)
    best = max(answer.citations[0].sources, key=lambda source: source.score)
    assert best.external_id == "railway"


def test_off_exact_and_strict_give_the_same_answer(smol_memory: Memory) -> None:
    answers = {
        (policy, reuse): ask(smol_memory, policy=policy, reuse=reuse)
        for policy, reuse in (("exact", "auto"), ("exact", "off"), ("exact", "strict"), (None, "auto"))
    }
    assert len({answer.answer for answer in answers.values()}) == 1
    off = answers["exact", "off"]
    assert off.usage.cached_tokens == 0
    assert off.usage.prefilled_tokens == off.usage.prompt_tokens
    exact = answers["exact", "auto"]
    assert exact.usage.prefilled_tokens < off.usage.prefilled_tokens
    assert "gate" in answers[None, "auto"].reuse.fallback_reason


def test_each_policy_says_what_it_computed(smol_memory: Memory) -> None:
    names = ("map", "neighbours", "head", "head:2", "exact")
    by_policy = {name: ask(smol_memory, LIGHT, policy=name) for name in names}
    prefilled = [answer.usage.prefilled_tokens for answer in by_policy.values()]
    assert prefilled == sorted(prefilled)
    assert len(set(prefilled)) > 2
    for name, answer in by_policy.items():
        usage = answer.usage
        assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens, name
        assert 0 < answer.timings.ttft_ms <= answer.timings.total_ms
        assert answer.timings.retrieve_ms < answer.timings.ttft_ms


def test_a_question_asked_again_is_answered_from_what_its_first_answer_left(smol_memory: Memory) -> None:
    question = "How long is the Hollin valley railway?"
    first, again = (ask(smol_memory, question, policy="exact") for _ in range(2))
    assert again.answer == first.answer
    assert again.usage.prefilled_tokens == 1 < first.usage.prefilled_tokens
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert 0 < again.reuse.continued_tokens < again.usage.cached_tokens


def test_a_policy_that_looks_tells_what_it_cost(smol_memory: Memory) -> None:
    answer = ask(smol_memory, policy="select:0.3")
    assert 0 < answer.usage.looked_tokens < answer.usage.prefilled_tokens
    assert 0 < answer.timings.look_ms < answer.timings.ttft_ms
    assert ask(smol_memory, policy="head").timings.look_ms == 0


def test_a_stream_tells_the_same_as_the_answer(smol_memory: Memory) -> None:
    whole = ask(smol_memory, policy="map")
    request = QueryRequest(
        query=QUARRY, collection="library", policy="map", generation=Generation(max_tokens=16)
    )
    with smol_memory.query_stream(request) as stream:
        events = list(stream)
    kinds = [type(event).__name__ for event in events]
    assert kinds[:2] == ["QueryCreated", "RetrievalCompleted"]
    assert kinds[-1] == "QueryCompleted"
    assert "".join(e.text for e in events if isinstance(e, OutputDelta)) == whole.answer
    last = events[-1]
    assert isinstance(last, QueryCompleted)
    assert last.response.answer == whole.answer


def test_a_closed_stream_frees_its_blocks(smol_memory: Memory) -> None:
    request = QueryRequest(query=QUARRY, collection="library", generation=Generation(max_tokens=2000))
    with smol_memory.query_stream(request) as stream:
        for event in stream:
            if isinstance(event, OutputDelta):
                break
    reply = ask(smol_memory)  # runs behind the cancelled one
    assert reply.finish_reason in ("stop", "length")
    pool = smol_memory.store_stats().pool
    assert pool["private"] == 0
    assert pool["pinned"] == 0


def test_sampling_is_repeatable_with_a_seed_and_stops_where_asked(smol_memory: Memory) -> None:
    sampled = Generation(max_tokens=12, temperature=0.9, top_p=0.95, seed=7)
    first, second = (ask(smol_memory, generation=sampled).answer for _ in range(2))
    assert first == second
    greedy = ask(smol_memory, generation=Generation(max_tokens=12)).answer
    word = greedy.split()[3]
    stopped = ask(smol_memory, generation=Generation(max_tokens=12, stop=[word]))
    assert stopped.finish_reason == "stop"
    assert stopped.answer == greedy[: greedy.index(word)]


def test_filters_and_score_floors_narrow_what_is_retrieved(smol_memory: Memory) -> None:
    english = smol_memory.search(
        SearchRequest(query=QUARRY, collection="library", filter={"lang": "en"}, top_k=50)
    )
    assert {hit.external_id for hit in english.data} == {"railway"}
    newer = {"type": "gt", "key": "year", "value": 1902}
    assert not smol_memory.search(SearchRequest(query=QUARRY, collection="library", filter=newer)).data
    every = smol_memory.search(SearchRequest(query=QUARRY, collection="library", top_k=1000, min_score=-1.0))
    assert len(every.data) == smol_memory.get_collection("library").counts.chunks
    scores = [hit.score for hit in every.data]
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(FilterError):
        smol_memory.search(SearchRequest(query="a", collection="library", filter={"type": "eq", "key": 3}))


def test_nothing_relevant_is_said_and_not_made_up(smol_memory: Memory) -> None:
    answer = ask(smol_memory, min_score=0.99)
    assert answer.finish_reason == "no_match"
    assert not answer.chunks
    assert not answer.citations
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"query": "word " * 15_000}, ContextTooLong),
        ({"generation": Generation(max_tokens=30_000)}, ContextTooLong),
        ({"policy": "guess"}, BadRequestError),
        ({"policy": "head:0"}, BadRequestError),
        ({"query": ""}, BadRequestError),
        ({"query": "a\ud800"}, BadRequestError),
        ({"query": "a\x00"}, BadRequestError),
        ({"top_k": 0}, BadRequestError),
        ({"generation": Generation(temperature=-1.0)}, BadRequestError),
        ({"generation": Generation(top_p=float("nan"))}, BadRequestError),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(smol_memory: Memory, fields, error) -> None:
    with pytest.raises(error) as caught:
        ask(smol_memory, **fields)
    assert caught.value.hint
    assert ask(smol_memory, policy="map").finish_reason in ("stop", "length")


@pytest.mark.parametrize("blank", [" \n\u3000", "\u200b", "\ufeff"])
def test_a_blank_question_is_refused_before_any_work(smol_memory: Memory, blank: str) -> None:
    for call in (
        lambda: ask(smol_memory, query=blank),
        lambda: smol_memory.search(SearchRequest(query=blank, collection="library")),
    ):
        with pytest.raises(BadRequestError, match="blank") as caught:
            call()
        assert caught.value.hint


def test_after_a_restart_map_answers_from_disk_computing_only_the_question(
    tmp_path: Path, smollm2: Path, minilm: Path
) -> None:
    from memkv.config import load_config

    config = load_config(
        {"store.data_dir": str(tmp_path), "model.model": str(smollm2), "model.embedder": str(minilm)}, env={}
    )
    with Memory.open(config) as memory:
        memory.create_collection(CollectionCreate(name="library", chunk_tokens=96))
        text = "The Petrel carries flour. " * 30
        memory.ingest("library", [DocumentCreate(text=text, external_id="petrel")], wait=120)
        question = "What does the Petrel carry?"
        before = ask(memory, question, policy="map", generation=Generation(max_tokens=8))
    with Memory.open(config) as memory:
        after = ask(memory, question, policy="map", generation=Generation(max_tokens=8))
        assert after.answer == before.answer
        assert after.reuse.healed_chunks == 0
        chunk_tokens = sum(chunk.tokens for chunk in after.chunks)
        prefix = memory.get_collection("library").prefix_tokens
        assert after.usage.prefilled_tokens == after.usage.prompt_tokens - prefix - chunk_tokens
        assert memory.store_stats().counters["hits"] == 1 + len(after.chunks)
    files = sorted((tmp_path / "blocks").rglob("*.kv"))
    for file in files:  # one bit of every file, so that whatever is mapped is hit
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x10
        file.chmod(0o600)
        file.write_bytes(data)
    with Memory.open(config) as memory:
        healed = ask(memory, question, policy="map", generation=Generation(max_tokens=8))
        assert healed.answer == before.answer
        assert healed.reuse.healed_chunks == 1 + len(healed.chunks)
        assert list((tmp_path / "quarantine").iterdir())
    with Memory.open(config) as memory:
        assert ask(memory, question, policy="map").reuse.healed_chunks == 0
