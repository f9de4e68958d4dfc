"""One generation on its way through the engine."""

from __future__ import annotations

from collections import deque
from random import Random

import torch
from torch import Tensor

from memkv.engine.answer_text import AnswerText
from memkv.engine.generation import (
    FinishReason,
    Generation,
    GenerationResult,
    Timings,
    TokenEvent,
    Usage,
)
from memkv.engine.placement import place
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef, KVSource, Pin, Residency, ResidentChunk
from memkv.errors import PoolExhausted
from memkv.kv.block_table import BlockTable


class TokenRun:
    """The tokens of one block table that have to be computed, in order of position.

    The order is what lets a long run be taken in parts: when a token is computed, every private key that it
    sees is written.
    """

    def __init__(self, table: BlockTable, token_ids: list[int], positions: list[int]) -> None:
        self.table = table
        self.token_ids = token_ids
        self.positions = positions
        self.done = 0

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.done

    def append(self, token_id: int, position: int) -> None:
        self.token_ids.append(token_id)
        self.positions.append(position)


class Sequence:
    """A request with its blocks, its unfinished tokens and its answer.

    waiting ──start──► loading ──begin──► running ──accept...──► finished
    """

    def __init__(
        self,
        request: GenerateRequest,
        source: KVSource,
        generation: Generation,
        eos_token_ids: tuple[int, ...],
        now: float,
        queue_seconds: float,
    ) -> None:
        self.request = request
        self.source = source
        self.generation = generation
        self.placement = place(request)
        self.random = Random(request.sampling.seed)
        self.since = now  # submitted
        self.deadline = now + (queue_seconds if request.queue_seconds is None else request.queue_seconds)
        self.is_finished = False
        self.run: TokenRun | None = None
        self._eos_token_ids = () if request.sampling.ignore_eos else eos_token_ids
        self._answer = AnswerText(request.decoder() if request.decoder else None, request.sampling.stop)
        self._pin: Pin | None = None
        self._private: list[int] = []
        self._reserve: deque[int] = deque()
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logits: list[Tensor] = []
        self._logit_positions: list[int] = []
        self._healed_chunks = 0
        self._healed_tokens = 0
        self._started: float | None = None  # when it had its blocks,
        self._ready: float | None = None  # its chunks,
        self._first_token: float | None = None  # and its first token

    @property
    def prefix(self) -> ChunkRef:
        return self.request.prefix

    @property
    def strict(self) -> bool:
        return self.request.reuse == "strict"

    @property
    def pins(self) -> tuple[Pin, ...]:
        return () if self._pin is None else (self._pin,)

    @property
    def private_blocks(self) -> list[int]:
        return self._private

    @property
    def num_generated(self) -> int:
        return len(self._token_ids)

    def start(self, residency: Residency, now: float) -> Pin:
        """Takes every block that it will ever need. Raises `PoolExhausted` and then holds none."""
        pin = residency.pin(self.placement.refs)
        try:
            self._private = residency.allocate(self.placement.num_private_blocks)
        except PoolExhausted:
            pin.release()
            raise
        self._pin = pin
        table, reserve = self.placement.table(
            {chunk.ref.input_key: chunk.blocks for chunk in pin.chunks}, self._private
        )
        self._reserve = deque(reserve)
        ids = self.request.prompt_ids()
        positions = [
            position
            for segment in table.segments
            if segment.private
            for position in range(segment.position, segment.end)
        ]
        self.run = TokenRun(table, [ids[position] for position in positions], positions)
        self._started = now
        return pin

    def begin(self, now: float) -> None:
        """Every mapped chunk is in place."""
        self._ready = now

    def heal(self, chunk: ResidentChunk) -> None:
        """Notes that a chunk without valid KV is prefilled on this request's account."""
        self._healed_chunks += 1
        self._healed_tokens += chunk.ref.num_tokens

    def release(self, residency: Residency) -> None:
        """Gives back every block and pin; the one way out of each state. Doing it again does nothing."""
        if self._private:
            residency.release(self._private)
            self._private = []
        if self._pin is not None:
            self._pin.release()
            self._pin = None

    def num_logits(self, count: int) -> int:
        """How many of the next `count` tokens, counted from the last, need logits."""
        run = self.run
        assert run is not None
        left = run.remaining - count  # prompt tokens that come in later steps
        if self._token_ids:
            return 1
        return max(0, min(count, max(1, self.request.keep_logits) - left))

    def keep(self, logits: Tensor, positions: list[int]) -> None:
        """Keeps logits [n, vocab_size] for the result, where the request asked for it."""
        if self.request.keep_logits:
            self._logits.append(logits.float())
            self._logit_positions.extend(positions)

    def accept(self, token_id: int, now: float) -> tuple[TokenEvent, FinishReason | None]:
        """Adds a sampled token; makes room for its key unless it is the last one."""
        if self._first_token is None:
            self._first_token = now
        self._token_ids.append(token_id)
        reason: FinishReason | None = None
        text = ""
        if token_id in self._eos_token_ids:
            reason = "stop"
        else:
            text = self._answer.push(token_id)
            if self._answer.stopped:
                reason = "stop"
            elif len(self._token_ids) == self.request.sampling.max_tokens:
                reason = "length"
        if reason is None:
            self._grow(token_id)
        elif not self._answer.stopped:
            text += self._answer.finish()
            reason = "stop" if self._answer.stopped else reason
        self._text.append(text)
        return TokenEvent(token_id, text), reason

    def result(self, reason: FinishReason, now: float) -> GenerationResult:
        return GenerationResult(
            token_ids=list(self._token_ids),
            text="".join(self._text),
            finish_reason=reason,
            usage=self._usage(),
            timings=self._timings(now),
            logits=torch.cat(self._logits) if self._logits else None,
            logit_positions=tuple(self._logit_positions),
        )

    def _grow(self, token_id: int) -> None:
        assert self.run is not None
        table = self.run.table
        last = table.segments[-1]
        full = last.num_tokens == len(last.blocks) * table.block_size
        position = last.end
        table.grow(1, [self._reserve.popleft()] if full else [])
        self.run.append(token_id, position)

    def _usage(self) -> Usage:
        prompt = self.request.prompt_tokens
        if self.run is None:
            return Usage(prompt_tokens=prompt)
        fresh = sum(position < prompt for position in self.run.positions)
        computed = min(self.run.done, fresh)
        mapped = prompt - fresh
        is_ready = self._ready is not None
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=max(0, mapped - self._healed_tokens) if is_ready else 0,
            prefilled_tokens=computed + (self._healed_tokens if is_ready else 0),
            completion_tokens=len(self._token_ids),
            healed_chunks=self._healed_chunks,
            blocks_shared=len(set(self.run.table.shared_blocks())),
            blocks_fresh=self.placement.num_fresh_blocks,
            fallback_reason="chunk_kv_missing" if self._healed_chunks else "",
        )

    def _timings(self, now: float) -> Timings:
        started, ready, first = (
            now if moment is None else moment for moment in (self._started, self._ready, self._first_token)
        )
        return Timings(
            queue_ms=1e3 * (started - self.since),
            load_ms=1e3 * (ready - started),
            prefill_ms=1e3 * (first - ready),
            ttft_ms=1e3 * (first - self.since),
            total_ms=1e3 * (now - self.since),
        )
