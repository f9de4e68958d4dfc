"""One generation on its way through the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

import numpy as np
import torch
from torch import Tensor

from memkv.engine.answer_text import AnswerText
from memkv.engine.arrangement import Arrangement, as_asked, as_interrupted
from memkv.engine.batch import Part
from memkv.engine.continuations import Continuations, PromptOrigin
from memkv.engine.generation import (
    FinishReason,
    Generation,
    GenerationResult,
    Timings,
    TokenEvent,
    Usage,
)
from memkv.engine.look import Look
from memkv.engine.placement import place
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef, KVSource, Pin, Residency, ResidentChunk
from memkv.engine.reuse import BlockMass
from memkv.engine.token_run import Int64s, TokenRun
from memkv.errors import PoolExhausted


class Sequence:
    """A request with its blocks, its unfinished tokens and its answer.

    waiting ──start──► loading ──begin──► running ──accept...──► finished
       ▲                  │       └─► looking ──choose──┘          where its policy looks first
       └───interrupt──────┴──────────────────┘                     where blocks ran out

    Attributes:
        asked: the request as it was submitted.
        request: as it is laid out; what it had answered when it was interrupted is part of its tail.
        look: while it is looking; its run is then the looking pass.
        leaves_run: whether it may leave its last run to later requests.
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
        self.asked = as_asked(request)
        self.request, self.placement = request, self.asked.placement
        self.source = source
        self.generation = generation
        self.since = now  # submitted
        self.deadline = now + (queue_seconds if request.queue_seconds is None else request.queue_seconds)
        self.is_finished = False
        self.turn = 0  # among those who get blocks, when it last got its own
        self.run: TokenRun | None = None
        self.look: Look | None = None
        self.leaves_run = request.reuse != "off"
        self._eos_token_ids = () if request.sampling.ignore_eos else eos_token_ids
        self._answer = AnswerText(request.decoder() if request.decoder else None, request.sampling.stop)
        self._pin: Pin | None = None
        self._private: list[int] = []
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logits: list[Tensor] = []
        self._logit_positions: list[int] = []
        self._random = Random(request.sampling.seed)
        self._numbers: list[float] = []  # drawn, one for each token of its answer
        self._sampled: deque[tuple[Tensor, int]] = deque()  # tokens on the device that are still to come
        self._num_grown = 0  # tokens of its answer that have a place in its run
        self._order = tuple(range(len(request.chunks)))
        self._open_at = self._num_continued = 0
        self._mass: BlockMass | None = None  # what its look has measured
        self._num_resumed = 0  # tokens of its answer in its request's tail
        self._num_interrupted = 0
        self._used = Usage(prompt_tokens=request.prompt_tokens)  # when it last gave its blocks back
        self._healed: dict[str, int] = {}  # tokens of chunks, by key; each counts once, however often
        self._looked_tokens = 0
        self._started: float | None = None  # when it first had its blocks,
        self._ready: float | None = None  # its chunks,
        self._chosen: float | None = None  # what its policy wanted to know,
        self._first_token: float | None = None  # and its first token

    @property
    def prefix(self) -> ChunkRef:
        return self.request.prefix

    @property
    def context(self) -> ChunkRef:
        return self.request.chunk_context

    @property
    def origin(self) -> PromptOrigin:
        return PromptOrigin(self.prefix.input_key, tuple(ref.input_key for ref in self.request.chunks))

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

    @property
    def is_answering(self) -> bool:
        """Whether its next step is one more token of its answer."""
        return len(self._token_ids) + len(self._sampled) > self._num_resumed

    @property
    def has_tokens(self) -> bool:
        """Whether there is anything to compute before it gets another token."""
        return self.run is not None and self.run.remaining > 0

    @property
    def needs_block(self) -> bool:
        """Whether its last block is full."""
        assert self.run is not None
        last = self.run.table.segments[-1]
        return last.num_tokens == len(last.blocks) * self.run.table.block_size

    def wanted(self) -> Arrangement:
        """As it was asked, or what is left of it where it was interrupted."""
        if not self._num_interrupted:
            return self.asked
        answered = self._token_ids[self._num_resumed :]
        return as_interrupted(self.request, answered, self._order, self._mass)

    def start(self, arrangement: Arrangement, residency: Residency, now: float) -> Pin:
        """Takes the blocks of its prompt. Raises `PoolExhausted` and then holds none."""
        self._num_resumed = len(self._token_ids)
        self.request, self.placement = arrangement.request, arrangement.placement
        self._order = arrangement.order
        self._open_at, self._num_continued = arrangement.open_at, arrangement.num_continued
        pin = residency.pin(self.placement.refs)
        try:
            self._private = residency.allocate(self.placement.num_private_blocks)
        except PoolExhausted:
            pin.release()
            raise
        own = ((), self.context.token_ids)
        assert all(chunk.ref.context_ids in own for chunk in pin.reserved), (
            "bug: a run that was found is gone"
        )
        self._pin = pin
        if self.placement.look is not None:
            self.look = Look(self.placement.look, self.request, self.placement)
        self._lay_out()
        if self._started is None:
            self._started = now
        return pin

    def begin(self, now: float) -> None:
        """Every mapped chunk is in place."""
        if self._ready is None:
            self._ready = now

    def choose(self, residency: Residency, now: float) -> None:
        """The look is over: the policy names its blocks, and those that it spared are given back."""
        assert self.look is not None and self.run is not None, "bug: a choice without a look"
        self._mass = self.look.block_mass()
        self.placement = place(self.request, self._mass)
        spare = len(self._private) - self.placement.num_private_blocks
        assert spare >= 0, "bug: a look chose more blocks than were taken"
        if spare:
            residency.release(self._private[-spare:])
            del self._private[-spare:]
        self.look = None
        self._looked_tokens = self.run.done
        self._chosen = now
        self._lay_out()

    def heal(self, chunk: ResidentChunk) -> None:
        """Notes that a chunk without valid KV is prefilled on this request's account."""
        self._healed[chunk.ref.input_key] = chunk.ref.num_tokens

    def interrupt(self, residency: Residency) -> None:
        """Gives everything back, to go on from the tokens that it has when there is room again."""
        self._used = self._usage()
        self.release(residency)
        self._num_interrupted += 1
        self.deadline = float("inf")
        self.run = self.look = None
        self._sampled.clear()
        self._forget_logits()
        if not self._token_ids:
            self._logits.clear()
            self._logit_positions.clear()

    def leave_run(self, continuations: Continuations) -> None:
        """At its end: what it computed last, behind a context that was exact throughout, outlives it."""
        if not (self.leaves_run and self.placement.is_exact) or self.run is None:
            return
        answered = self._token_ids[self._num_resumed :]
        last = self.run.table.segments[-1]
        num_ahead = self._num_grown - (len(answered) - 1)  # its last token and what would have come behind it
        assert self.run.remaining <= num_ahead, "bug: an answer ended before it was computed"
        num_tokens = last.num_tokens - num_ahead
        blocks = last.blocks[: -(-num_tokens // self.run.table.block_size)]
        last = replace(last, num_tokens=num_tokens, blocks=blocks)
        ids = np.concatenate((self.request.prompt_ids, answered), dtype=np.int64)
        if continuations.keep(self.origin, ids, last, self._open_at):
            left = set(last.blocks)
            self._private = [block for block in self._private if block not in left]

    def release(self, residency: Residency) -> None:
        """Gives back every block and pin; the one way out of each state. Doing it again does nothing."""
        if self._private:
            residency.release(self._private)
            self._private = []
        if self._pin is not None:
            self._pin.release()
            self._pin = None

    def part(self, count: int) -> Part[Sequence]:
        """Its next `count` tokens, with what is wanted of them."""
        run = self.run
        assert run is not None
        left = run.remaining - count  # tokens that come in later steps
        if self.look is not None:
            return Part(self, run, count, look=self.look.wanted, look_rows=self.look.rows_of(count, left))
        if self.is_answering:
            is_known = run.done - run.first_count < len(self._token_ids) - self._num_resumed
            return Part(self, run, count, num_logits=1, fed=None if is_known else self._sampled[-1])
        return Part(self, run, count, max(0, min(count, max(1, self.request.keep_logits) - left)))

    def keep(self, logits: Tensor, positions: Int64s) -> None:
        """Keeps logits [n, vocab_size] for the result, where the request asked for it."""
        if self.request.keep_logits:
            self._logits.append(logits.float())
            self._logit_positions.extend(positions.tolist())

    def number(self) -> float:
        """In [0, 1), to draw its next token by; the same whenever it comes to that token."""
        index = len(self._token_ids) + len(self._sampled)
        while len(self._numbers) <= index:
            self._numbers.append(self._random.random())
        return self._numbers[index]

    def sampled(self, tokens: Tensor, row: int) -> None:
        """Its next token is on the device, and comes to `accept` later."""
        self._sampled.append((tokens, row))

    def go_ahead(self, residency: Residency) -> None:
        """Makes room for the key of a token that it does not know yet, where it is sure to need it."""
        most = self.request.sampling.max_tokens
        if len(self._token_ids) + len(self._sampled) < most and not (
            self.needs_block and not residency.fits((), 1)
        ):
            self._grow(0, residency)

    def accept(self, token_id: int, now: float) -> tuple[TokenEvent, FinishReason | None]:
        """Adds a sampled token; without a reason to finish, `grow` follows, unless it is interrupted."""
        self._sampled.popleft()
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
        if reason is not None and not self._answer.stopped:
            text += self._answer.finish()
            reason = "stop" if self._answer.stopped else reason
        self._text.append(text)
        return TokenEvent(token_id, text), reason

    @property
    def is_ahead(self) -> bool:
        """Whether there is room for the key of its last token."""
        return self._num_grown >= len(self._token_ids) - self._num_resumed

    def resolve(self) -> None:
        """Puts its last token where room was made for it."""
        assert self.run is not None
        self.run.resolve(len(self._token_ids) - self._num_resumed - 1, self._token_ids[-1])

    def grow(self, residency: Residency) -> None:
        """Makes room for the key of its last token. Raises `PoolExhausted` where that takes a block."""
        self._grow(self._token_ids[-1], residency)

    def _grow(self, token_id: int, residency: Residency) -> None:
        assert self.run is not None
        blocks = residency.allocate(1) if self.needs_block else []
        self._private.extend(blocks)
        self.run.append(token_id, blocks)
        self._num_grown += 1

    def _forget_logits(self) -> None:
        """Those behind tokens that were computed ahead, and are not part of its answer."""
        last = self.asked.request.prompt_tokens + max(len(self._token_ids), 1) - 2
        while self._logit_positions and self._logit_positions[-1] > last:
            self._logit_positions.pop()
            self._logits.pop()  # each of its own

    def result(self, reason: FinishReason, now: float) -> GenerationResult:
        self._forget_logits()
        return GenerationResult(
            token_ids=list(self._token_ids),
            text="".join(self._text),
            finish_reason=reason,
            usage=self._usage(),
            timings=self._timings(now),
            logits=torch.cat(self._logits) if self._logits else None,
            logit_positions=tuple(self._logit_positions),
            chunk_order=self._order,
        )

    def _lay_out(self) -> None:
        """Makes the table of the placement, and the run of what is to be computed in it."""
        assert self._pin is not None
        blocks = {chunk.ref.input_key: chunk.blocks for chunk in self._pin.chunks}
        table = self.placement.table(blocks, self._private)
        room = self.request.sampling.max_tokens - 1
        self.run = TokenRun.of_private(table, self.request.prompt_ids, room)
        self._num_grown = 0

    def _usage(self) -> Usage:
        prompt = self.asked.request.prompt_tokens
        if self.run is None:
            completion_tokens, interruptions = len(self._token_ids), self._num_interrupted
            return replace(self._used, completion_tokens=completion_tokens, interruptions=interruptions)
        fresh = int(np.count_nonzero(self.run.positions < prompt))
        computed = min(self.run.done, fresh) if self.look is None else 0
        mapped = prompt - fresh
        is_ready = self._ready is not None
        healed = sum(self._healed.values()) if is_ready else 0
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=max(0, mapped - healed) if is_ready else 0,
            prefilled_tokens=computed + healed,
            looked_tokens=self._looked_tokens if self.look is None else self.run.done,
            completion_tokens=len(self._token_ids),
            healed_chunks=len(self._healed),
            blocks_shared=len(set(self.run.table.shared_blocks())),
            blocks_fresh=self.placement.num_fresh_blocks,
            continued_tokens=self._num_continued if is_ready else 0,
            interruptions=self._num_interrupted,
            fallback_reason="chunk_kv_missing" if self._healed else "",
        )

    def _timings(self, now: float) -> Timings:
        started = now if self._started is None else self._started
        ready = now if self._ready is None else self._ready
        chosen = self._chosen
        if chosen is None:
            chosen = ready if self.look is None else now
        first = now if self._first_token is None else self._first_token
        return Timings(
            queue_ms=1e3 * (started - self.since),
            load_ms=1e3 * (ready - started),
            look_ms=1e3 * (chosen - ready),
            prefill_ms=1e3 * (first - chosen),
            ttft_ms=1e3 * (first - self.since),
            total_ms=1e3 * (now - self.since),
        )
