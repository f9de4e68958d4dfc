"""The same body for every client, on the real memory: what a caller sees does not depend on where it runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from memkv.errors import (
    BadRequestError,
    ChunkNotFound,
    CollectionExists,
    CollectionNotFound,
    ConflictError,
    ContextTooLong,
    DocumentNotFound,
    EmptyDocument,
    FilterError,
    JobNotFound,
    UnprocessableDocumentError,
)
from memkv.wire import (
    Accepted,
    Collection,
    Document,
    Info,
    Job,
    Message,
    OutputDelta,
    QueryCompleted,
    QueryCreated,
    QueryResponse,
    RetrievalCompleted,
    SearchResponse,
    StoreStats,
)

TEXT = "The lighthouse of Porto Velho was built in 1912. Its keeper was Amalia Reis."


@pytest.fixture
def filled(client: Any, collection: str) -> str:
    """A collection with one document, ready."""
    client.collections.create(collection)
    client.documents.create(collection, text=TEXT, external_id="port", metadata={"lang": "en"})
    return collection


def test_service(client: Any) -> None:
    assert client.ready().status == "ready"
    info = client.info()
    assert isinstance(info, Info)
    assert info.model.kv_bytes_per_token > 0
    assert isinstance(client.store.stats(), StoreStats)


def test_collections(client: Any, collection: str) -> None:
    made = client.collections.create(collection, description="d", metadata={"a": 1}, chunk_tokens=32)
    assert isinstance(made, Collection)
    assert (made.description, made.metadata, made.chunk_tokens) == ("d", {"a": 1}, 32)
    assert client.collections.retrieve(collection) == made
    with pytest.raises(CollectionExists):
        client.collections.create(collection)
    same = {"description": "d", "metadata": {"a": 1}, "chunk_tokens": 32}
    assert client.collections.get_or_create(collection, **same) == made
    with pytest.raises(ConflictError):
        client.collections.get_or_create(collection, description="other")
    assert client.collections.delete(collection) is None
    with pytest.raises(CollectionNotFound):
        client.collections.retrieve(collection)
    assert client.collections.get_or_create(collection).name == collection


def test_lists_go_on_over_pages(client: Any, collection: str) -> None:
    client.collections.create(collection)
    for number in range(5):
        client.documents.create(collection, text=f"Text {number}.", external_id=str(number), wait=False)
    listed = client.documents.list(collection, limit=2)
    assert len(listed.data) == 2
    assert listed.has_more
    assert [entry.external_id for entry in listed] == ["0", "1", "2", "3", "4"]
    assert [entry.external_id for entry in listed.next_page().data] == ["2", "3"]
    backwards = client.documents.list(collection, limit=2, order="desc")
    assert [entry.external_id for entry in backwards] == ["4", "3", "2", "1", "0"]
    before = client.documents.list(collection, limit=2, before=listed.next_page().page.last_id)
    assert [entry.external_id for entry in before.data] == ["1", "2"]
    assert isinstance(listed.data[0], Document)
    assert [entry.status for entry in client.jobs.list(collection=collection, limit=3)]


def test_documents_from_everywhere(client: Any, collection: str, tmp_path: Path) -> None:
    client.collections.create(collection)
    path = tmp_path / "from path ü.md"
    path.write_text("# Heading\n\nA file by its path.")
    opened = io.BytesIO(b"An open file.")
    made = [
        client.documents.create(collection, text="A text.", external_id="a/b", title="T"),
        client.documents.create(collection, path=path),
        client.documents.create(collection, file=("named.txt", opened)),
        client.documents.create(collection, file=b"Bytes without a name."),
        client.documents.create(collection, file=b"Other bytes without a name."),
    ]
    for accepted in made:
        assert isinstance(accepted, Accepted)
        assert (accepted.documents[0].outcome, accepted.documents[0].status) == ("created", "ready")
    keys = [entry.external_id for entry in client.documents.list(collection)]
    assert keys[:3] == ["a/b", "from path ü.md", "named.txt"]
    assert len(set(keys)) == 5
    assert client.documents.retrieve(collection, "a/b").title == "T"
    assert client.documents.retrieve(collection, "from path ü.md").status == "ready"


def test_upsert_replaces(client: Any, filled: str) -> None:
    for text, outcome in ((TEXT, "unchanged"), (TEXT + " It is red.", "updated")):
        accepted = client.documents.upsert(filled, "port", text=text, metadata={"lang": "en"})
        assert accepted.documents[0].outcome == outcome
        assert (accepted.job is None) == (outcome == "unchanged")
    found = client.documents.upsert(filled, "..", text="A key of dots.")
    assert found.documents[0].external_id == ".."
    assert client.documents.retrieve(filled, "..").external_id == ".."
    client.documents.delete(filled, "..")
    assert client.collections.retrieve(filled).counts.documents == 1


def test_delete(client: Any, filled: str) -> None:
    assert client.documents.delete(filled, "port") is None
    for method in (client.documents.retrieve, client.documents.delete):
        with pytest.raises(DocumentNotFound):
            method(filled, "port")


def test_jobs_and_progress(client: Any, collection: str) -> None:
    client.collections.create(collection)
    text = "\n\n".join(f"Paragraph {number} of a longer text, with its own words." for number in range(30))
    accepted = client.documents.create(collection, text=text, wait=False)
    assert accepted.job.status in ("queued", "running", "succeeded")
    seen: list[Job] = []
    job = client.jobs.wait(accepted.job, on_progress=seen.append)
    assert job.status == "succeeded"
    assert seen[-1] == job
    assert client.jobs.retrieve(job.id) == job
    assert client.jobs.list(collection=collection, kind="ingest").page.data == [job]
    assert client.jobs.list(collection=collection, kind="gc").page.data == []
    with pytest.raises(JobNotFound):
        client.jobs.retrieve("job_none")
    shown: list[Job] = []
    again = client.documents.create(collection, text=text + " More.", on_progress=shown.append)
    assert shown[-1].status == again.job.status == "succeeded"
    assert again.documents[0].status == "ready"


def test_filters(client: Any, filled: str) -> None:
    for wanted, count in (({"lang": "en"}, 1), ({"lang": "de"}, 0)):
        assert len(client.documents.list(filled, filter=wanted).data) == count
        assert len(client.search("lighthouse", collection=filled, filter=wanted).data) == count
    tree = {"type": "and", "filters": [{"type": "ne", "key": "lang", "value": "de"}]}
    assert len(client.documents.list(filled, filter=tree).data) == 1
    with pytest.raises(FilterError):
        client.documents.list(filled, filter={"type": "eq"})
    with pytest.raises(FilterError):
        client.search("q", collection=filled, filter={"type": "eq"})


def test_search_and_query(client: Any, filled: str) -> None:
    found = client.search("Who kept the lighthouse?", collection=filled, top_k=1)
    assert isinstance(found, SearchResponse)
    assert found.data[0].external_id == "port"
    answer = client.query("Who kept the lighthouse?", collection=filled, max_tokens=3, policy="map")
    assert isinstance(answer, QueryResponse)
    assert answer.reuse.policy == "map"
    assert answer.usage.completion_tokens == 3
    assert answer.chunks[0].external_id == "port"
    again = client.query("Who kept the lighthouse?", collection=filled, max_tokens=3, policy="map")
    assert again.answer == answer.answer


def test_streams(client: Any, filled: str) -> None:
    with client.query_stream("Who kept the lighthouse?", collection=filled, max_tokens=3) as stream:
        events = list(stream)
    assert isinstance(events[0], QueryCreated)
    assert isinstance(events[1], RetrievalCompleted)
    assert isinstance(events[-1], QueryCompleted)
    assert stream.response == events[-1].response
    assert "".join(e.text for e in events if isinstance(e, OutputDelta)) == stream.response.answer
    finished = client.query_stream("Who kept the lighthouse?", collection=filled, max_tokens=3).finish()
    assert finished.answer == stream.response.answer


def test_conversations(client: Any, filled: str) -> None:
    conversation = client.conversation(filled, max_tokens=3, policy="exact")
    first = conversation.ask("Who kept the lighthouse?")
    assert isinstance(first, QueryResponse)
    assert first.chunks[0].external_id == "port"
    second = conversation.ask("When was it built?")
    assert second.chunks == []
    assert second.usage.prefilled_tokens < first.usage.prompt_tokens < second.usage.cached_tokens
    assert [message.role for message in conversation.messages] == ["user", "assistant"] * 2
    assert [message.content for message in conversation.messages[1::2]] == [first.answer, second.answer]
    with pytest.raises(BadRequestError, match="blank"):
        conversation.ask(" ")
    assert len(conversation.messages) == 4
    plain = [{"role": "user", "content": "Who kept the lighthouse?"}]
    plain[0]["chunk_ids"] = [chunk.chunk_id for chunk in first.chunks]
    plain += [
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": "When was it built?"},
    ]
    again = client.query(messages=plain, collection=filled, max_tokens=3, policy="exact")
    assert again.answer == second.answer
    asked = [*conversation.messages, Message(role="user", content="By whom?")]
    with client.query_stream(messages=asked, collection=filled, max_tokens=3) as stream:
        list(stream)
    assert stream.response.usage.prompt_tokens > second.usage.prompt_tokens


def test_messages_that_are_no_conversation(client: Any, filled: str) -> None:
    question = {"role": "user", "content": "Who?"}
    gone = [{**question, "chunk_ids": ["chk_none"]}, {"role": "assistant", "content": "Ada"}, question]
    with pytest.raises(ChunkNotFound, match="chk_none"):
        client.query(messages=gone, collection=filled)
    for messages in ([{"role": "user"}], ["Who?"], [question, question], []):
        with pytest.raises(BadRequestError) as caught:
            client.query(messages=messages, collection=filled)
        assert caught.value.hint
    with pytest.raises(BadRequestError, match="exclude each other"):
        client.query("Who?", messages=[question], collection=filled)


def test_a_stream_that_is_left_early(client: Any, filled: str) -> None:
    with client.query_stream("Who kept it?", collection=filled, max_tokens=500) as stream:
        for event in stream:
            if isinstance(event, OutputDelta):
                break
    with pytest.raises(BadRequestError, match="has not ended"):
        _ = stream.response
    assert client.query("Who kept it?", collection=filled, max_tokens=2).usage.completion_tokens == 2


def test_errors_are_the_ones_raised_inside(client: Any, collection: str) -> None:
    with pytest.raises(CollectionNotFound) as caught:
        client.documents.create(collection, text="t")
    assert caught.value.detail
    client.collections.create(collection)
    with pytest.raises(EmptyDocument):
        client.documents.create(collection, text=" \n ")
    with pytest.raises(UnprocessableDocumentError) as unreadable:
        client.documents.create(collection, text="a\0b")
    assert unreadable.value.hint
    with pytest.raises(UnprocessableDocumentError):
        client.documents.create(collection, text="\ud800")
    with pytest.raises(BadRequestError):
        client.collections.create("no name")
    with pytest.raises(BadRequestError):
        client.query("q", collection=collection, policy="guess")
    with pytest.raises(BadRequestError):
        client.query("q", collection=collection, top_k=0)
    with pytest.raises(BadRequestError):
        client.documents.create(collection, text="t", metadata={"a": [1]})
    with pytest.raises(ContextTooLong):
        client.query("word " * 10_000, collection=collection)
    with (
        pytest.raises(ContextTooLong),
        client.query_stream("word " * 10_000, collection=collection) as stream,
    ):
        list(stream)


def test_arguments_that_say_nothing(client: Any, collection: str, tmp_path: Path) -> None:
    client.collections.create(collection)
    for arguments in (
        {},
        {"text": "t", "file": b"t"},
        {"path": tmp_path / "none.txt"},
        {"file": io.StringIO("t")},
    ):
        with pytest.raises(BadRequestError):
            client.documents.create(collection, **arguments)
    with pytest.raises(BadRequestError):
        client.documents.retrieve(collection, "")
    with pytest.raises(BadRequestError):
        client.documents.create(collection, text="t", wait=-1)
