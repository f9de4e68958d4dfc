"""A question answered: retrieve, map, generate, cite."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from memkv.engine.generation import Generation, GenerationResult
from memkv.engine.request import GenerateRequest, Piece
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import ReusePolicy
from memkv.engine.sampler import Sampling
from memkv.errors import ContextTooLong
from memkv.memory.collections import OpenCollection
from memkv.memory.conversation import Conversation, pieces_of, recall
from memkv.memory.gate import ChosenPolicy, cheapest_that_passed, named_policy
from memkv.memory.metrics import Metric
from memkv.memory.parts import Parts
from memkv.memory.retrieval import Retrieval, Retrieved
from memkv.store.rows import ChunkRow
from memkv.text.citations import CitableChunk, align
from memkv.text.tokenizer import StreamDecoder
from memkv.wire import (
    Citation,
    CitationAdded,
    CitationSource,
    OutputDelta,
    QueryCompleted,
    QueryCreated,
    QueryEvent,
    QueryRequest,
    QueryResponse,
    Quote,
    RetrievalCompleted,
    RetrievedChunk,
    ReuseReport,
    Timings,
    Usage,
)

NO_MATCH = "Nothing in this collection answers the question."


class Answering:
    def __init__(self, parts: Parts, retrieval: Retrieval) -> None:
        self._parts = parts
        self._retrieval = retrieval
        self._lock = threading.Lock()  # guards what follows
        self._num_retrievals, self._retrieve_seconds = 0, 0.0

    def metrics(self) -> Iterator[Metric]:
        with self._lock:
            count, seconds = self._num_retrievals, self._retrieve_seconds
        yield Metric("memkv_retrievals", "questions that chunks were retrieved for", "counter", {"": count})
        yield Metric("memkv_retrieve_seconds", "time that it took", "counter", {"": seconds})

    def start(self, collection: OpenCollection, request: QueryRequest) -> QueryStream:
        """Retrieves and submits; the answer comes through the stream.

        Args:
            request: with `messages`.

        Raises:
            BadRequestError, ChunkNotFound, ContextTooLong, ServiceUnavailableError: before anything is
                generated.
        """
        started = time.perf_counter()
        wanted = named_policy(request.policy or self._parts.config.query.policy)
        tail_ids = tuple(collection.template.tail_ids(request.question))
        sampling = self._sampling(request)
        conversation = recall(collection, self._retrieval, request.messages[:-1])
        room = self._room(collection, conversation, tail_ids, sampling.max_tokens)
        found = self._retrieval.search(
            collection, request.question, request.top_k, request.filter, request.min_score
        )
        mapped = _that_fit(conversation.new_among(found), room)
        chunks = [hit.chunk for hit in (*conversation.chunks, *mapped)]
        chosen = self._auto(collection, chunks) if wanted is None else ChosenPolicy(wanted)
        retrieve_ms = _ms_since(started)
        with self._lock:
            self._num_retrievals += 1
            self._retrieve_seconds += retrieve_ms / 1e3
        if not mapped and not conversation.chunks:
            return QueryStream(_Question(request, chosen, [], started, retrieve_ms), None)
        pieces = pieces_of(collection, (*conversation.parts, *mapped))
        if request.reuse != "off":
            self._prefetch(collection, chosen.policy, pieces)
        self._parts.store.uses.note(collection.row.tenant, [hit.chunk.input_key for hit in mapped])
        generation = self._parts.engine.generate(
            GenerateRequest(
                prefix=collection.prefix,
                chunks=(),
                pieces=pieces,
                tail_ids=tail_ids,
                block_size=collection.row.block_size,
                policy=chosen.policy,
                reuse=request.reuse,
                sampling=sampling,
                decoder=lambda: StreamDecoder(self._parts.tokenizer),
            ),
            collection.kv,
        )
        submitted_ms = _ms_since(started)
        earlier = conversation.chunks
        question = _Question(request, chosen, mapped, started, retrieve_ms, submitted_ms, earlier)
        return QueryStream(question, generation)

    def _prefetch(self, collection: OpenCollection, policy: ReusePolicy, pieces: Sequence[Piece]) -> None:
        """Starts to load what the policy will map, before the prompt is laid out and queued."""
        chunks = [piece for piece in pieces if isinstance(piece, ChunkRef)]
        mapped = chunks if policy.maps_other_contexts else chunks[:1]
        refs = (collection.prefix, *mapped)
        self._parts.engine.prefetch(refs, collection.kv, block_size=collection.row.block_size)

    def _auto(self, collection: OpenCollection, chunks: Sequence[ChunkRow]) -> ChosenPolicy:
        """What was measured decides."""
        return cheapest_that_passed(
            self._parts.store.catalog.gates(collection.row.fingerprint_digest),
            self._parts.config.query,
            chunk_tokens=collection.row.max_chunk_tokens,
            mapped_tokens=sum(len(chunk.token_ids) for chunk in chunks),
        )

    def _sampling(self, request: QueryRequest) -> Sampling:
        wanted = request.generation
        return Sampling(
            max_tokens=wanted.max_tokens or self._parts.config.query.max_tokens,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            seed=wanted.seed,
            stop=tuple(wanted.stop),
        )

    def _room(
        self,
        collection: OpenCollection,
        conversation: Conversation,
        tail_ids: Sequence[int],
        max_tokens: int,
    ) -> int:
        """Tokens that new chunks may fill. Raises `ContextTooLong` where all else leaves none."""
        context = self._parts.model.spec.max_context
        earlier = conversation.num_tokens
        room = context - len(collection.row.prefix_ids) - earlier - len(tail_ids) - max_tokens
        if room < 0:
            turns, shorten = "", "shorten the question"
            if earlier:
                turns, shorten = f"the turns before take {earlier} tokens, ", "leave the oldest turns out"
            raise ContextTooLong(
                f"{turns}the question takes {len(tail_ids)} tokens and its answer up to {max_tokens}; "
                f"the model's context is {context}",
                hint=f"{shorten} or ask for fewer max_tokens",
            )
        return room


@dataclass(frozen=True, slots=True)
class _Question:
    request: QueryRequest
    chosen: ChosenPolicy
    mapped: list[Retrieved]
    started: float
    retrieve_ms: float
    submitted_ms: float = 0.0
    earlier: Sequence[Retrieved] = ()


class QueryStream:
    """The events of one answer, in order. Closing it, or leaving it in a `with`, cancels the rest."""

    def __init__(self, question: _Question, generation: Generation | None) -> None:
        self.id = f"qry_{uuid.uuid4().hex}"
        self._question = question
        self._generation = generation

    def __iter__(self) -> Iterator[QueryEvent]:
        """Raises `MemKVError` where generation fails midway."""
        question = self._question
        chunks = [hit.reply for hit in question.mapped]
        yield QueryCreated(id=self.id)
        yield RetrievalCompleted(chunks=chunks, retrieve_ms=question.retrieve_ms)
        if self._generation is None:
            yield OutputDelta(text=NO_MATCH)
            yield QueryCompleted(response=self._no_match())
            return
        with self._generation:
            for event in self._generation:
                if event.text:
                    yield OutputDelta(text=event.text)
            result = self._generation.result()
        earlier = [hit.reply for hit in question.earlier]
        laid_out = [index - len(earlier) for index in result.chunk_order]
        chunks = [chunks[index] for index in laid_out if index >= 0]
        citations = cite(result.text, [*chunks, *earlier])
        for citation in citations:
            yield CitationAdded(citation=citation)
        named = {source.chunk_id for citation in citations for source in citation.sources}
        cited = [chunk for chunk in earlier if chunk.chunk_id in named]
        yield QueryCompleted(response=self._completed(result, chunks, citations, cited))

    def response(self) -> QueryResponse:
        """Waits for the end. Raises `MemKVError` where generation fails."""
        *_, last = self
        assert isinstance(last, QueryCompleted), "bug: a stream ended without its answer"
        return last.response

    def close(self) -> None:
        """Stops generation; its blocks are free within one step."""
        if self._generation is not None:
            self._generation.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _no_match(self) -> QueryResponse:
        question = self._question
        return QueryResponse(
            id=self.id,
            answer=NO_MATCH,
            finish_reason="no_match",
            citations=[],
            chunks=[],
            usage=Usage(),
            reuse=ReuseReport(mode=question.request.reuse, policy=question.chosen.policy.name),
            timings=Timings(retrieve_ms=question.retrieve_ms, total_ms=_ms_since(question.started)),
        )

    def _completed(
        self,
        result: GenerationResult,
        chunks: list[RetrievedChunk],
        citations: list[Citation],
        earlier: list[RetrievedChunk],
    ) -> QueryResponse:
        question, usage, timings = self._question, result.usage, result.timings
        assert result.finish_reason != "error", "bug: a failed generation has a result"
        reasons = (question.chosen.fallback_reason, usage.fallback_reason)
        return QueryResponse(
            id=self.id,
            answer=result.text,
            finish_reason=result.finish_reason,
            citations=citations,
            chunks=chunks,
            usage=Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                prefilled_tokens=usage.prefilled_tokens,
                looked_tokens=usage.looked_tokens,
                completion_tokens=usage.completion_tokens,
            ),
            reuse=ReuseReport(
                mode=question.request.reuse,
                policy=question.chosen.policy.name,
                fallback_reason="; ".join(reason for reason in reasons if reason),
                blocks_shared=usage.blocks_shared,
                blocks_fresh=usage.blocks_fresh,
                continued_tokens=usage.continued_tokens,
                healed_chunks=usage.healed_chunks,
            ),
            timings=Timings(
                retrieve_ms=question.retrieve_ms,
                queue_ms=timings.queue_ms,
                load_ms=timings.load_ms,
                look_ms=timings.look_ms,
                prefill_ms=timings.prefill_ms,
                ttft_ms=question.submitted_ms + timings.ttft_ms,
                total_ms=_ms_since(question.started),
            ),
            earlier_chunks=earlier,
        )


def cite(answer: str, chunks: Sequence[RetrievedChunk]) -> list[Citation]:
    """Spans of the answer with the chunks that support them, found in the text after generation."""
    citable = [CitableChunk(index, chunk.text) for index, chunk in enumerate(chunks)]
    return [
        Citation(
            start=aligned.start,
            end=aligned.end,
            text=answer[aligned.start : aligned.end],
            sources=[
                CitationSource(
                    document_id=chunks[source.index].document_id,
                    external_id=chunks[source.index].external_id,
                    title=chunks[source.index].title,
                    chunk_id=chunks[source.index].chunk_id,
                    quote=Quote(start=source.quote_start, end=source.quote_end),
                    score=source.score,
                )
                for source in aligned.sources
            ],
        )
        for aligned in align(answer, citable)
    ]


def _that_fit(found: Sequence[Retrieved], room: int) -> list[Retrieved]:
    """The best chunks that fill at most `room` tokens, each text once, in order of score."""
    distinct: dict[str, Retrieved] = {}
    for hit in found:
        distinct.setdefault(hit.chunk.input_key, hit)
    filled = itertools.accumulate(len(hit.chunk.token_ids) for hit in distinct.values())
    return [hit for hit, tokens in zip(distinct.values(), filled, strict=True) if tokens <= room]


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000.0
