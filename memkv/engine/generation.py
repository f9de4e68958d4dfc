"""What a caller holds while the engine works on its request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from torch import Tensor

from memkv.errors import APITimeoutError, MemKVError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token and the text that became certain with it: possibly none, or of earlier ones too."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost.

    Attributes:
        prompt_tokens: prefix, chunks and tail.
        cached_tokens: prompt tokens whose mapped KV was used and not computed for this request.
        prefilled_tokens: tokens computed for this request before its first answer token: fresh blocks, tail
            and healed chunks. A healed chunk's blocks that the policy then computes afresh count twice.
        looked_tokens: tokens of the pass that the policy looked by; its keys and values are not kept.
        completion_tokens: tokens sampled, an end-of-text token included.
        healed_chunks: chunks (the prefix included) that had no valid KV and were prefilled for this request.
        blocks_shared: distinct blocks mapped, held in common with everyone else who maps them.
        blocks_fresh: private blocks of this request.
        continued_tokens: of the cached tokens, those that earlier requests left behind their own answers.
        interruptions: how often its blocks went to older requests and were computed again; not counted above.
        fallback_reason: why less was reused than asked for; empty where nothing stood in the way.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    looked_tokens: int = 0
    completion_tokens: int = 0
    healed_chunks: int = 0
    blocks_shared: int = 0
    blocks_fresh: int = 0
    continued_tokens: int = 0
    interruptions: int = 0
    fallback_reason: str = ""


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds; each stage from the end of the one before it.

    Attributes:
        queue_ms: submitted until blocks were reserved.
        load_ms: until every mapped chunk was in place, healing included.
        look_ms: until the policy had what it wanted to know; 0 where it does not look.
        prefill_ms: until the first token.
        ttft_ms: submitted until the first token.
        total_ms: submitted until finished.
    """

    queue_ms: float = 0.0
    load_ms: float = 0.0
    look_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class GenerationResult:
    """A finished answer.

    Attributes:
        token_ids: every sampled token, an end-of-text token and those of a stop text included.
        text: the answer: neither of them is part of it.
        logits: [num_kept, vocab_size] float32 where the request asked to keep them.
        logit_positions: of the tokens behind which the logits were taken.
        chunk_order: the order in which the request's chunks stood in the prompt, as indices into them.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logits: Tensor | None = None
    logit_positions: tuple[int, ...] = ()
    chunk_order: tuple[int, ...] = ()


class Generation:
    """An answer in the making. Iterate it for its tokens as they come, or wait for `result()`.

    Leaving it as a context manager cancels what is not finished. Any thread may use any method; every
    iterator sees all tokens from the first.
    """

    def __init__(self) -> None:
        self.on_cancel: Callable[[], None] | None = None  # the engine sets it
        lock = threading.Lock()  # guards what follows
        self._changed = threading.Condition(lock)  # a token, or the end
        self._ended = threading.Condition(lock)
        self._events: list[TokenEvent] = []
        self._result: GenerationResult | None = None
        self._error: MemKVError | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs."""
        if self._error is not None:
            return "error"
        return None if self._result is None else self._result.finish_reason

    def __iter__(self) -> Iterator[TokenEvent]:
        """Tokens as they come. Raises what the request failed with, behind the tokens it had."""
        seen = 0
        while True:
            with self._changed:
                while len(self._events) == seen and not self._is_finished:
                    self._changed.wait()
                fresh = self._events[seen:]
            if not fresh:
                break
            yield from fresh
            seen += len(fresh)
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Asks the engine to stop; the blocks are free within one step. Does nothing once it is finished."""
        cancel = self.on_cancel
        if cancel is not None and not self._is_finished:
            cancel()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Waits for the end.

        Raises:
            MemKVError: what the request failed with.
            APITimeoutError: not finished after `timeout` seconds; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._ended:
            while not self._is_finished:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise APITimeoutError(f"the answer is not finished after {timeout} seconds")
                self._ended.wait(left)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    @property
    def _is_finished(self) -> bool:
        return self._result is not None or self._error is not None

    def deliver(self, event: TokenEvent) -> None:
        """For the engine: one more token."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def finish(self, outcome: GenerationResult | MemKVError) -> None:
        """For the engine: the end. A second one is ignored."""
        with self._changed:
            if self._is_finished:
                return
            if isinstance(outcome, MemKVError):
                self._error = outcome
            else:
                self._result = outcome
            self.on_cancel = None  # an answer that is kept keeps no engine
            self._changed.notify_all()
            self._ended.notify_all()
