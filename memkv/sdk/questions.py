"""The requests that ask something, without IO: search, query, conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from memkv.errors import BadRequestError
from memkv.sdk.call import Call
from memkv.wire import (
    Filter,
    Generation,
    Message,
    QueryRequest,
    QueryResponse,
    Reuse,
    SearchRequest,
    SearchResponse,
)


def search(
    query: str,
    *,
    collection: str,
    top_k: int | None = None,
    filter: Filter | None = None,
    min_score: float | None = None,
) -> Call[SearchResponse]:
    """The chunks nearest to a text."""
    wanted = SearchRequest(
        query=query, collection=collection, top_k=top_k, filter=filter, min_score=min_score
    )
    return Call(
        method="POST",
        path="/v1/search",
        reply=SearchResponse,
        body=wanted,
        local=lambda memory: memory.search(wanted),
    )


def query(
    query: str = "",
    *,
    collection: str,
    messages: Sequence[Message | Mapping[str, Any]] = (),
    top_k: int | None = None,
    filter: Filter | None = None,
    min_score: float | None = None,
    policy: str | None = None,
    reuse: Reuse = "auto",
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    sample_top_k: int = 0,
    seed: int | None = None,
    stop: list[str] | None = None,
) -> Call[QueryResponse]:
    """Answers a question from a collection, with citations.

    Args:
        query: the question; or else
        messages: a conversation that ends with it: `Message`, or {"role": ..., "content": ...,
            "chunk_ids": [...]}. `conversation` keeps them.
        collection: where to look.
        top_k: chunks to retrieve; the server's default if None.
        filter: on metadata; `{"lang": "en"}` or the tree of the API.
        min_score: chunks below it are left out.
        policy: auto, exact, order, map, head:N, neighbours:N, select:R or mass:P.
        reuse: `strict` refuses to compute what should have been stored; `off` maps nothing.
        max_tokens, temperature, top_p, sample_top_k, seed, stop: of the generation; `sample_top_k` is the
            number of likeliest tokens to draw from, 0 for all.
    """
    wanted = QueryRequest(
        query=query,
        messages=_messages(messages),
        collection=collection,
        top_k=top_k,
        filter=filter,
        min_score=min_score,
        policy=policy,
        reuse=reuse,
        generation=Generation(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=sample_top_k,
            top_p=top_p,
            seed=seed,
            stop=stop or [],
        ),
    )
    return answer(wanted)


def conversation(
    collection: str,
    *,
    top_k: int | None = None,
    filter: Filter | None = None,
    min_score: float | None = None,
    policy: str | None = None,
    reuse: Reuse = "auto",
    max_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
) -> QueryRequest:
    """A conversation about a collection: its `ask` answers one question after another.

    The options are those of `query`.
    """
    return QueryRequest(
        collection=collection,
        top_k=top_k,
        filter=filter,
        min_score=min_score,
        policy=policy,
        reuse=reuse,
        generation=Generation(max_tokens=max_tokens, temperature=temperature, seed=seed),
    )


def answer(wanted: QueryRequest) -> Call[QueryResponse]:
    """The answer to a question or a conversation."""
    return Call(
        method="POST",
        path="/v1/query",
        reply=QueryResponse,
        body=wanted,
        local=lambda memory: memory.query(wanted),
    )


def _messages(given: Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    try:
        return msgspec.convert(list(given), list[Message])
    except (msgspec.ValidationError, TypeError) as error:
        raise BadRequestError(
            f"messages are not those of a conversation: {error}",
            hint='each is {"role": "user" or "assistant", "content": "...", "chunk_ids": [...]}',
        ) from error
