"""What the engine is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import Exact, ReusePolicy
from memkv.engine.sampler import Sampling
from memkv.engine.token_run import Int64s
from memkv.errors import BadRequestError

Reuse = Literal["auto", "off", "strict"]
Piece = ChunkRef | tuple[int, ...]  # a chunk, or the token ids of a text


class TextDecoder(Protocol):
    """Token ids of one answer to text, in order. Called from the engine's thread."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""

    def finish(self) -> str:
        """What is left when no token follows."""


@dataclass(frozen=True)
class GenerateRequest:
    """One answer: prefix, pieces and tail stand behind each other, positions from 0 without gaps.

    Attributes:
        prefix: the collection's; a ref without context, possibly without tokens.
        chunks: in prompt order; each was, or will be, prefilled behind the context.
        tail_ids: what follows them (the question and the answer's head); at least one token.
        block_size: of the collection's layout.
        policy: which blocks of the chunks are computed afresh.
        reuse: "auto" maps what there is and prefills what is missing; "strict" raises `ReuseUnavailable`
            where a mapped chunk has no KV; "off" maps nothing, not even the prefix.
        sampling: how the answer is drawn.
        decoder: makes the answer's decoder; without one, events carry token ids and no text.
        queue_seconds: how long it may wait for blocks; the configuration's value by default.
        keep_logits: for measurements: the result carries the logits behind the last so many prompt tokens
            and behind every token of the answer.
        pieces: for prompts with texts between the chunks, as a conversation has: all that stands between
            prefix and tail. Given, it says what `chunks` are; otherwise it is the chunks.
        context: what the chunks are prefilled behind, a ref without context; the prefix by default. Where
            it is another one, no chunk is exact at any place.
    """

    prefix: ChunkRef
    chunks: tuple[ChunkRef, ...]
    tail_ids: tuple[int, ...]
    block_size: int = 16
    policy: ReusePolicy = field(default_factory=Exact)
    reuse: Reuse = "auto"
    sampling: Sampling = field(default_factory=Sampling)
    decoder: Callable[[], TextDecoder] | None = None
    queue_seconds: float | None = None
    keep_logits: int = 0
    pieces: tuple[Piece, ...] = ()
    context: ChunkRef | None = None

    def __post_init__(self) -> None:
        if not self.pieces:
            object.__setattr__(self, "pieces", self.chunks)
        elif not self.chunks:
            chunks = tuple(piece for piece in self.pieces if isinstance(piece, ChunkRef))
            object.__setattr__(self, "chunks", chunks)

    @property
    def chunk_context(self) -> ChunkRef:
        return self.prefix if self.context is None else self.context

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @cached_property
    def prompt_ids(self) -> Int64s:
        """[prompt_tokens]"""
        texts = [
            np.array(each, dtype=np.int64) if isinstance(each, tuple) else each.ids for each in self.pieces
        ]
        return np.concatenate((self.prefix.ids, *texts, _array(self.tail_ids)))

    def validate(self, vocab_size: int) -> None:
        """Raises `BadRequestError` for what no engine can run."""
        _validate_refs(self.prefix, ())
        _validate_refs(self.chunk_context, self.chunks)
        if self.chunks != tuple(piece for piece in self.pieces if isinstance(piece, ChunkRef)):
            raise BadRequestError("pieces and chunks name other chunks", hint="give one of them")
        _validate_ids(self.prompt_ids, vocab_size)
        if self.context is not None:
            _validate_ids(self.context.ids, vocab_size)
        if not self.tail_ids:
            raise BadRequestError("the prompt has no tail", hint="a question is needed behind the chunks")
        if self.reuse not in ("auto", "off", "strict"):
            raise BadRequestError(f"reuse = {self.reuse!r} is not possible", hint="auto, off or strict")
        if self.sampling.stop and self.decoder is None:
            raise BadRequestError("stop texts need a decoder", hint="pass `decoder` in the request")
        if not 0 <= self.keep_logits <= self.prompt_tokens:
            raise BadRequestError(
                f"keep_logits = {self.keep_logits} is not possible", hint="0 to the prompt's tokens"
            )
        if self.queue_seconds is not None and not self.queue_seconds >= 0:
            raise BadRequestError(f"queue_seconds = {self.queue_seconds} is not possible", hint="at least 0")


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Chunks to be computed behind one context, each as if no other were there."""

    context: ChunkRef
    chunks: tuple[ChunkRef, ...]
    block_size: int = 16

    def validate(self, vocab_size: int) -> None:
        """Raises `BadRequestError` for what no engine can run."""
        _validate_refs(self.context, self.chunks)
        _validate_ids(np.concatenate([ref.ids for ref in (self.context, *self.chunks)]), vocab_size)


def piece_ids(piece: Piece) -> tuple[int, ...]:
    return piece if isinstance(piece, tuple) else piece.token_ids


def _array(ids: tuple[int, ...]) -> Int64s:
    return np.array(ids, dtype=np.int64)


def _validate_refs(context: ChunkRef, chunks: tuple[ChunkRef, ...]) -> None:
    if context.context_ids:
        raise BadRequestError("the prefix has a context", hint="a prefix is a ref with context_ids = ()")
    for ref in chunks:
        if not ref.token_ids:
            raise BadRequestError(f"chunk {ref.input_key[:16]} has no tokens")
        if ref.context_ids != context.token_ids:
            raise BadRequestError(
                f"chunk {ref.input_key[:16]} belongs behind another prefix",
                hint="use the prefix that the collection was made with",
            )


def _validate_ids(ids: Int64s, vocab_size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise BadRequestError(
            f"token ids run from {ids.min()} to {ids.max()}, the model's vocabulary from 0 to "
            f"{vocab_size - 1}",
            hint="the tokenizer and the model do not belong together",
        )
