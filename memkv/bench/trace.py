"""A trace of requests, and prompts that are as long as its own and share what they share.

A line of a trace is {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]};
each id but the last stands for the same 512 tokens wherever it stands, the last one for the question. The
tokens are random. As many chunks as a trace names do not fit a disk, so a few bodies stand for them: each id
is a chunk of its own to the engine, in blocks of its own, with the tokens and the file of one of the bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec

from memkv.bench.engine_store import BenchStore
from memkv.engine.engine import Engine
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import parse_policy
from memkv.engine.sampler import Sampling
from memkv.errors import BadRequestError
from memkv.kv.chunk import ChunkKV

CHUNK_TOKENS = 512
_PREFIX_TOKENS = 64
_BLOCK_SIZE = 16
_BODIES_AT_ONCE = 8
_KEYS = 1 << 128  # where the keys of a trace's chunks begin; those of the bodies at twice that


class TraceRequest(msgspec.Struct, frozen=True):
    """One line; `timestamp` in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return _PREFIX_TOKENS + self.input_length + self.output_length


def read_trace(path: Path, seconds: float) -> list[TraceRequest]:
    """The requests of the first so many seconds, in order. Raises `BadRequestError`."""
    try:
        lines = path.read_bytes().splitlines()
        found = [msgspec.json.decode(line, type=TraceRequest) for line in lines if line.strip()]
    except (OSError, msgspec.DecodeError) as error:
        raise BadRequestError(f"{path} is not a trace: {error}", hint="one JSON object a line") from error
    for request in found:
        question = request.input_length - CHUNK_TOKENS * (len(request.hash_ids) - 1)
        if not (0 < question <= CHUNK_TOKENS and request.output_length > 0):
            raise BadRequestError(
                f"{path}: {request.input_length} tokens in {len(request.hash_ids)} pieces of {CHUNK_TOKENS}",
                hint="each id but the last stands for 512 tokens, and an output has at least one",
            )
    within = [request for request in found if request.timestamp < 1e3 * seconds]
    return sorted(within, key=lambda request: request.timestamp)


class TracePrompts:
    """Prompts for a trace; a `KVSource` of their chunks once `prepare` has made the bodies.

    Args:
        num_bodies: distinct chunks of tokens.
    """

    def __init__(self, store: BenchStore, vocab_size: int, num_bodies: int) -> None:
        self._store = store
        self._vocab_size = vocab_size
        random = Random(0)
        self.prefix = ChunkRef(f"{1:064x}", (), self._ids(random, _PREFIX_TOKENS))
        self._bodies = [
            ChunkRef(f"{2 * _KEYS + index:064x}", self.prefix.token_ids, self._ids(random, CHUNK_TOKENS))
            for index in range(num_bodies)
        ]

    @property
    def num_bodies(self) -> int:
        return len(self._bodies)

    def prepare(self, engine: Engine) -> None:
        """Computes the bodies, and leaves them and the prefix on disk alone."""
        for first in range(0, len(self._bodies), _BODIES_AT_ONCE):
            batch = self._bodies[first : first + _BODIES_AT_ONCE]
            made = engine.prefill(self.prefix, batch, self._store, block_size=_BLOCK_SIZE)
            self._store.publish(list(zip(batch, made, strict=True)))
        engine.drop([self.prefix.input_key, *(body.input_key for body in self._bodies)])

    def forget(self, engine: Engine, trace: Sequence[TraceRequest]) -> None:
        """Takes all that a trace left in an engine out of it."""
        ids = {each for request in trace for each in request.hash_ids[:-1]}
        engine.drop([self.prefix.input_key, *map(_key, ids)])

    def request(self, asked: TraceRequest, policy: str) -> GenerateRequest:
        """Args: policy: "off", or the name of one."""
        question = asked.input_length - CHUNK_TOKENS * (len(asked.hash_ids) - 1)
        return GenerateRequest(
            prefix=self.prefix,
            chunks=tuple(map(self._chunk, asked.hash_ids[:-1])),
            tail_ids=self._ids(Random(asked.hash_ids[-1]), question),
            block_size=_BLOCK_SIZE,
            policy=parse_policy("exact" if policy == "off" else policy),
            reuse="off" if policy == "off" else "auto",
            sampling=Sampling(max_tokens=asked.output_length, ignore_eos=True),
            queue_seconds=float("inf"),
        )

    def read(self, ref: ChunkRef) -> ChunkKV | None:
        if ref == self.prefix:
            return self._store.read(ref)
        body = self._bodies[int(ref.input_key, 16) % len(self._bodies)]
        return self._store.read(replace(ref, input_key=body.input_key))

    def write(self, ref: ChunkRef, kv: ChunkKV) -> None:
        """What had to be computed is not kept."""

    def _chunk(self, hash_id: int) -> ChunkRef:
        body = self._bodies[(hash_id + _KEYS) % len(self._bodies)]
        return replace(body, input_key=_key(hash_id))

    def _ids(self, random: Random, count: int) -> tuple[int, ...]:
        return tuple(random.randrange(self._vocab_size) for _ in range(count))


def _key(hash_id: int) -> str:
    return f"{_KEYS + hash_id:064x}"
