"""What types alone cannot say of a request, in words that say what to do."""

from __future__ import annotations

import pytest

from memkv.validation import Violation, decode_request, validate_request
from memkv.wire import Message, QueryRequest, SearchRequest

USER, ANSWER = Message(role="user", content="Who?"), Message(role="assistant", content="")
NAMED = Message(role="user", content="Who?", chunk_ids=["chk_1"])


@pytest.mark.parametrize(
    ("query", "messages", "loc", "says"),
    [
        ("", [], "query", "the question is empty"),
        ("Who?", [USER], "query", "exclude each other"),
        ("", [ANSWER], "messages[0].role", "of the user"),
        ("", [USER, USER], "messages[1].role", "of the assistant"),
        ("", [USER, ANSWER, ANSWER], "messages[2].role", "of the user"),
        ("", [USER, ANSWER], "messages", "last message is an answer"),
        ("", [NAMED], "messages[0].chunk_ids", "that were answered"),
        ("", [USER, ANSWER, NAMED], "messages[2].chunk_ids", "that were answered"),
        (
            "",
            [USER, Message(role="assistant", content="x", chunk_ids=["chk_1"]), USER],
            "messages[1].chunk_ids",
            "that were answered",
        ),
    ],
)
def test_a_query_is_one_question_at_the_end_of_whole_turns(
    query: str, messages: list[Message], loc: str, says: str
) -> None:
    with pytest.raises(Violation, match=says) as caught:
        validate_request(QueryRequest(query=query, messages=messages, collection="c"))
    assert caught.value.loc == loc
    assert caught.value.hint


def test_conversations_that_are_whole() -> None:
    for messages in ([USER], [NAMED, ANSWER, USER], [USER, ANSWER] * 499 + [USER]):
        request = QueryRequest(messages=messages, collection="c")
        assert validate_request(request) == request
        assert request.question == "Who?"
    assert QueryRequest(query="Where?", collection="c").question == "Where?"


@pytest.mark.parametrize(
    "message",
    [
        '{"role":"system","content":"x"}',
        '{"role":"user"}',
        '{"role":"user","content":5}',
        '{"role":"user","content":"x","chunk_ids":[""]}',
        '{"role":"user","content":"x","chunk_ids":["' + "x" * 129 + '"]}',
        '{"role":"user","content":"' + "x" * 100_001 + '"}',
        '{"role":"user","content":"a\\u0000"}',
        '{"role":"user","content":"x","name":"y"}',
    ],
)
def test_messages_are_held_to_their_limits(message: str) -> None:
    body = '{"collection":"c","messages":[' + message + "]}"
    with pytest.raises(Violation, match="messages"):
        decode_request(body.encode(), QueryRequest)


def test_there_is_an_end_to_a_conversation() -> None:
    with pytest.raises(Violation, match="999"):
        validate_request(QueryRequest(messages=[USER, ANSWER] * 500, collection="c"))


def test_what_must_not_be_empty_says_so() -> None:
    with pytest.raises(Violation, match="query: must not be empty"):
        validate_request(SearchRequest(query="", collection="c"))
