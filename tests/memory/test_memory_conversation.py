"""Conversations: each turn computes its own text, and says what a full prefill of the same messages says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memkv.errors import BadRequestError, ChunkNotFound, ContextTooLong
from memkv.memory import Memory
from memkv.text.prompt import PromptTemplate
from memkv.text.tokenizer import TextTokenizer
from memkv.wire import (
    CitationAdded,
    CollectionCreate,
    DocumentCreate,
    Generation,
    Message,
    QueryRequest,
    QueryResponse,
)

QUESTIONS = (
    "When was the Skerry lighthouse lit for the first time?",
    "How tall is its tower?",
    "Who recorded the great storm?",
    "What do the trains of the Hollin valley railway carry?",
    "And which engine is the oldest?",
)


def ask(
    memory: Memory, messages: list[Message], question: str, collection: str = "library", **fields
) -> QueryResponse:
    fields = {"top_k": 2, "policy": "exact", "generation": Generation(max_tokens=24), **fields}
    asked = Message(role="user", content=question)
    return memory.query(QueryRequest(messages=[*messages, asked], collection=collection, **fields))


def said(question: str, response: QueryResponse) -> list[Message]:
    """What the client adds to its messages."""
    ids = [chunk.chunk_id for chunk in response.chunks]
    return [
        Message(role="user", content=question, chunk_ids=ids),
        Message(role="assistant", content=response.answer),
    ]


def test_each_of_five_turns_computes_its_own_text_only(smol_memory: Memory) -> None:
    tokenizer: TextTokenizer = smol_memory._parts.tokenizer
    template = PromptTemplate.from_tokenizer(tokenizer)
    boundary = len(template.turn_ids(""))
    messages: list[Message] = []
    last: QueryResponse | None = None
    shown: list[str] = []
    for question in QUESTIONS:
        response = ask(smol_memory, messages, question)
        off = ask(smol_memory, messages, question, reuse="off")
        assert response.answer == off.answer
        assert response.chunks == off.chunks
        assert off.usage.cached_tokens == 0
        assert off.usage.prompt_tokens == response.usage.prompt_tokens
        if last is not None:
            new_chunks = sum(chunk.tokens for chunk in response.chunks)
            cut = last.finish_reason == "length"  # then the answer's last token was not fed back
            own = boundary + new_chunks + len(template.tail_ids(question)) + cut
            assert response.usage.prefilled_tokens == own
            kept = last.usage.prompt_tokens + last.usage.completion_tokens - 1
            assert response.usage.cached_tokens == kept
        shown += [chunk.chunk_id for chunk in response.chunks]
        messages += said(question, response)
        last = response
    assert len(shown) == len(set(shown)) > 2  # a chunk that stands there is not put there again


def test_one_message_is_a_query(smol_memory: Memory) -> None:
    plain = smol_memory.query(
        QueryRequest(query=QUESTIONS[0], collection="library", generation=Generation(max_tokens=8))
    )
    message = ask(smol_memory, [], QUESTIONS[0], top_k=4, generation=Generation(max_tokens=8))
    assert message.answer == plain.answer
    assert message.usage.prompt_tokens == plain.usage.prompt_tokens


def test_another_question_over_the_same_chunks_computes_itself(smol_memory: Memory) -> None:
    template = PromptTemplate.from_tokenizer(smol_memory._parts.tokenizer)
    question = "What does the boat Petrel carry?"
    first = ask(smol_memory, [], question, top_k=3)
    for more in (" Tell me.", " Say it in one word."):
        response = ask(smol_memory, [], question + more, top_k=3)
        assert [chunk.chunk_id for chunk in response.chunks] == [chunk.chunk_id for chunk in first.chunks]
        tail, known = template.tail_ids(question + more), template.tail_ids(question)
        common = next(i for i, (a, b) in enumerate(zip(tail, known, strict=False)) if a != b)
        assert response.usage.prefilled_tokens == len(tail) - common


@pytest.mark.parametrize("policy", ["map", "head", "select:0.3", "order"])
def test_every_policy_takes_part(smol_memory: Memory, policy: str) -> None:
    messages: list[Message] = []
    for question in QUESTIONS[2:4]:
        response = ask(smol_memory, messages, question, policy=policy)
        usage = response.usage
        assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
        messages += said(question, response)
    assert response.reuse.policy.startswith(policy.partition(":")[0])


def test_chunks_that_were_reordered_are_named_as_they_stood(smol_memory: Memory) -> None:
    """So that what the client sends back is the prompt that was answered."""
    every = {"top_k": 1000, "min_score": -1.0}
    first = ask(smol_memory, [], QUESTIONS[0], **every)
    best_first = ask(smol_memory, [], QUESTIONS[3], reuse="off", **every)
    response = ask(smol_memory, [], QUESTIONS[3], policy="order", **every)
    stood = [chunk.chunk_id for chunk in response.chunks]
    assert stood == [chunk.chunk_id for chunk in first.chunks]
    assert stood != [chunk.chunk_id for chunk in best_first.chunks]
    turn = ask(smol_memory, said(QUESTIONS[3], response), QUESTIONS[4], **every)
    kept = response.usage.prompt_tokens + response.usage.completion_tokens - 1
    assert turn.usage.cached_tokens == kept


def test_an_answer_may_cite_a_chunk_of_an_earlier_turn(smol_memory: Memory) -> None:
    """Nothing new is retrieved, so that only the first turn's chunks can be cited."""
    messages = said(QUESTIONS[0], ask(smol_memory, [], QUESTIONS[0]))
    request = QueryRequest(
        messages=[*messages, Message(role="user", content=QUESTIONS[0])],
        collection="library",
        min_score=1.0,
        generation=Generation(max_tokens=24),
    )
    with smol_memory.query_stream(request) as stream:
        events = list(stream)
    response = events[-1].response
    assert response.finish_reason != "no_match"
    assert response.chunks == []
    assert response.citations == [event.citation for event in events if isinstance(event, CitationAdded)]
    sources = [source for citation in response.citations for source in citation.sources]
    assert sources
    texts = {chunk.chunk_id: chunk.text for chunk in response.earlier_chunks}
    assert set(texts) == {source.chunk_id for source in sources} <= set(messages[0].chunk_ids)
    assert all(source.quote.end <= len(texts[source.chunk_id]) for source in sources)


def test_a_turn_that_found_nothing_may_stand_in_a_conversation(smol_memory: Memory) -> None:
    nothing = ask(smol_memory, [], QUESTIONS[0], min_score=1.0)
    assert nothing.finish_reason == "no_match"
    again = ask(smol_memory, said(QUESTIONS[0], nothing), QUESTIONS[0], min_score=1.0)
    assert again.finish_reason == "no_match"
    found = ask(smol_memory, said(QUESTIONS[0], nothing), QUESTIONS[0])
    assert found.chunks
    assert found.finish_reason in ("stop", "length")


def test_a_conversation_that_is_too_long_says_how_much_each_part_takes(smol_memory: Memory) -> None:
    messages = [Message(role="user", content="Hm?"), Message(role="assistant", content="word " * 9_000)]
    with pytest.raises(ContextTooLong, match=r"turns before take 9\d\d\d tokens") as caught:
        ask(smol_memory, messages, "Why?")
    assert "oldest turns" in caught.value.hint


@pytest.fixture
def tiny(open_memory: Callable[..., Memory]) -> Memory:
    memory = open_memory()
    for name in ("one", "other"):
        memory.create_collection(CollectionCreate(name=name, chunk_tokens=32))
        documents = [
            DocumentCreate(text=f"Lamp {number} of {name} burns oil.", external_id=str(number))
            for number in range(3)
        ]
        memory.ingest(name, documents, wait=60)
    return memory


def test_chunks_of_another_collection_or_of_nobody_are_refused(tiny: Memory) -> None:
    response = ask(tiny, [], "Which lamp?", "one")
    assert len(response.chunks) == 2
    messages = said("Which lamp?", response)
    for name, ids in (("other", messages[0].chunk_ids), ("one", ["chk_none"])):
        foreign = [Message(role="user", content="Which lamp?", chunk_ids=ids), messages[1]]
        with pytest.raises(ChunkNotFound, match=f"'{name}' has no chunk '{ids[0]}'") as caught:
            ask(tiny, foreign, "And then?", name)
        assert "chunk_ids" in caught.value.hint
    assert ask(tiny, messages, "And then?", "one").finish_reason in ("stop", "length")


@pytest.mark.parametrize("change", ["forgotten", "changed"])
def test_a_chunk_whose_document_is_gone_or_changed_is_refused(tiny: Memory, change: str) -> None:
    response = ask(tiny, [], "Which lamp?", "one")
    messages = said("Which lamp?", response)
    first = response.chunks[0]
    if change == "forgotten":
        tiny.forget("one", first.external_id)
    else:
        new = DocumentCreate(text="There is no lamp at all.", external_id=first.external_id)
        tiny.ingest("one", [new], wait=60)
    with pytest.raises(ChunkNotFound, match=first.chunk_id):
        ask(tiny, messages, "And then?", "one")
    left = [id_ for id_ in messages[0].chunk_ids if id_ != first.chunk_id]
    messages[0] = Message(role="user", content="Which lamp?", chunk_ids=left)
    assert first.chunk_id not in {chunk.chunk_id for chunk in ask(tiny, messages, "And then?", "one").chunks}


def test_tenants_do_not_see_each_other(tiny: Memory) -> None:
    tiny._parts.store.catalog.create_tenant("guest")
    tiny.create_collection(CollectionCreate(name="one", chunk_tokens=32), tenant="guest")
    tiny.ingest("one", [DocumentCreate(text="Lamp 0 of one burns oil.")], wait=60, tenant="guest")
    messages = said("Which lamp?", ask(tiny, [], "Which lamp?", "one"))
    asked = [*messages, Message(role="user", content="And then?")]
    with pytest.raises(ChunkNotFound):
        tiny.query(QueryRequest(messages=asked, collection="one"), tenant="guest")


def test_a_chunk_named_twice_stands_once(tiny: Memory) -> None:
    messages = said("Which lamp?", ask(tiny, [], "Which lamp?", "one"))
    once = ask(tiny, messages, "And then?", "one")
    twice = [
        Message(role="user", content="Which lamp?", chunk_ids=messages[0].chunk_ids * 2),
        messages[1],
    ]
    assert ask(tiny, twice, "And then?", "one").usage.prompt_tokens == once.usage.prompt_tokens


def test_a_blank_question_anywhere_is_refused(tiny: Memory) -> None:
    for content in ("", " \n"):
        with pytest.raises(BadRequestError, match="blank"):
            ask(
                tiny,
                [Message(role="user", content=content), Message(role="assistant", content="")],
                "Hm?",
                "one",
            )
