"""Which chunks are in device memory, who holds them, and which go when room is needed.

    missing ──pin──► reserved ──ready()──► resident, pinned ⇄ resident, idle ──evicted or dropped──► missing
                        │                                         ▲
                        │                                         └── adopt ── private blocks of a sequence
                        └─ last pin released before it was ready: its blocks are free again

The cache itself holds one reference to every block of a chunk, and each pin one more; the sequences that map
a chunk share its blocks whatever their positions. A dropped chunk is not found any more, and lives until its
last pin is released.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from memkv.engine.eviction import EvictionOrder, worth
from memkv.engine.kv_cache import KVCache
from memkv.errors import InternalServerError, PoolExhausted
from memkv.kv.block_pool import BlockPool
from memkv.kv.chunk import ChunkKV


@dataclass(frozen=True)
class ChunkRef:
    """A chunk by its key, with the tokens that its KV depends on. The prefix is one with no context.

    `after`: the key of the chunk before it in its document, where the caller knows it.
    """

    input_key: str
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    after: str = field(default="", compare=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """[num_tokens], its token ids."""
        return np.array(self.token_ids, dtype=np.int64)

    @property
    def stored_position(self) -> int:
        """The position at which its first key was rotated."""
        return len(self.context_ids)


class KVSource(Protocol):
    """Where chunks come from when they are not resident. Called from the engine's loader threads."""

    def read(self, ref: ChunkRef) -> ChunkKV | None:
        """The verified KV of a chunk; None where there is none or it was damaged."""

    def write(self, ref: ChunkRef, kv: ChunkKV) -> None:
        """Keeps what the engine had to prefill because `read` had nothing."""


class ResidentChunk:
    """A chunk that holds blocks.

    Attributes:
        blocks, block_ids: the same, as a tuple and as an array.
        ready: they are written and may be mapped.
        adopted: a sequence left them.
        pins, uses: who holds it, and who has held it.
    """

    __slots__ = ("adopted", "block_ids", "blocks", "dropped", "pins", "ready", "ref", "uses")

    def __init__(self, ref: ChunkRef, blocks: Sequence[int], *, adopted: bool = False) -> None:
        self.ref = ref
        self.blocks = tuple(blocks)
        self.block_ids = np.array(blocks, dtype=np.int64)
        self.adopted = self.ready = adopted
        self.dropped = False
        self.pins = self.uses = 0

    @property
    def worth(self) -> float:
        return worth(self.uses, self.ref.num_tokens, self.ref.stored_position, len(self.blocks))


class Pin:
    """Holds chunks in place until it is released: neither eviction nor deletion takes their blocks.

    Attributes:
        chunks: one for each distinct ref, in the order asked for.
        reserved: those of them that are new: somebody has to fill them and call `Residency.ready`.
    """

    def __init__(
        self, residency: Residency, chunks: list[ResidentChunk], reserved: list[ResidentChunk]
    ) -> None:
        self._residency = residency
        self.chunks = chunks
        self.reserved = reserved
        self._awaited = [chunk for chunk in chunks if not chunk.ready]
        self._released = False

    @property
    def is_ready(self) -> bool:
        while self._awaited and self._awaited[-1].ready:
            self._awaited.pop()
        return not self._awaited

    def release(self, *, cold: bool = False) -> None:
        """Lets go, once. `cold`: what becomes idle is the first to be evicted, not the last."""
        if not self._released:
            self._released = True
            self._residency._let_go(self.chunks, cold=cold)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by who holds them; together the whole pool."""

    free: int
    cached: int  # of resident chunks that nobody pins
    pinned: int  # of chunks that somebody pins, those still to be filled included
    private: int  # of running sequences

    @property
    def total(self) -> int:
        return self.free + self.cached + self.pinned + self.private


class Residency:
    """The chunks in one KV cache, and the only way to its blocks. Belongs to the engine's thread."""

    def __init__(self, kv_cache: KVCache, pool: BlockPool) -> None:
        self._kv_cache = kv_cache
        self._pool = pool
        self._chunks: dict[str, ResidentChunk] = {}
        self._idle: EvictionOrder[ResidentChunk] = EvictionOrder()  # ready and unpinned
        self._dropped: set[ResidentChunk] = set()  # not found any more, still pinned
        self.num_adopted_blocks = 0  # of adopted chunks that can be found
        self.num_changes = 0  # after which what did not fit may fit
        self._num_idle_blocks = 0
        self._num_private = 0

    def knows(self, ref: ChunkRef) -> bool:
        """Whether a chunk is here, or on its way."""
        return ref.input_key in self._chunks

    def fits(self, refs: Iterable[ChunkRef], num_private: int = 0) -> bool:
        """Whether these chunks can be pinned and so many private blocks allocated, all at once."""
        missing = protected = 0
        for key, ref in {ref.input_key: ref for ref in refs}.items():
            chunk = self._chunks.get(key)
            if chunk is None:
                missing += self._kv_cache.layout.blocks_for(ref.num_tokens)
            elif chunk.pins == 0:
                protected += len(chunk.blocks)
        return missing + num_private <= self._pool.num_free + self._num_idle_blocks - protected

    def pin(self, refs: Iterable[ChunkRef]) -> Pin:
        """Protects the chunks that are here and reserves blocks for the others; all of them or none.

        Raises:
            PoolExhausted: no room even after evicting every idle chunk.
            InternalServerError: two chunks of different tokens have the same key.
        """
        wanted = {ref.input_key: ref for ref in refs}
        here = [chunk for key, ref in wanted.items() if (chunk := self._find(key, ref)) is not None]
        self._hold(here)  # making room must not evict them
        reserved: list[ResidentChunk] = []
        try:
            for key, ref in wanted.items():
                if key not in self._chunks:
                    reserved.append(self._reserve(ref))
        except PoolExhausted:
            self._let_go([*here, *reserved])
            raise
        held = {chunk.ref.input_key: chunk for chunk in itertools.chain(here, reserved)}
        return Pin(self, [held[key] for key in wanted], reserved)

    def hold(self, chunk: ResidentChunk) -> Pin:
        """One more pin on a chunk that somebody pins, dropped or not."""
        assert chunk.pins > 0, "bug: a chunk that nobody pins was held"
        self._hold([chunk])
        return Pin(self, [chunk], [])

    def ready(self, chunk: ResidentChunk) -> None:
        """Says that the blocks of a reserved chunk are written."""
        assert chunk.pins > 0, "bug: a chunk that nobody waits for was filled"
        chunk.ready = True

    def drop(self, input_keys: Iterable[str]) -> None:
        """Forgets chunks: whoever pins one keeps it, nobody finds it any more."""
        for key in input_keys:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._remove(chunk)

    def allocate(self, num_blocks: int) -> list[int]:
        """Private blocks for one sequence. Raises `PoolExhausted`."""
        blocks = self._take(num_blocks)
        self._num_private += num_blocks
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Gives private blocks back."""
        self._pool.release(blocks)
        self._num_private -= len(blocks)
        self.num_changes += 1

    def adopt(self, ref: ChunkRef, blocks: Sequence[int]) -> ResidentChunk:
        """Takes written private blocks over as a chunk that nobody pins."""
        assert ref.input_key not in self._chunks, "bug: a chunk was adopted twice"
        chunk = ResidentChunk(ref, blocks, adopted=True)
        self.num_adopted_blocks += len(chunk.blocks)
        chunk.uses = 1
        self._chunks[ref.input_key] = chunk
        self._idle.add(chunk, chunk.worth)
        self._num_private -= len(chunk.blocks)
        self._num_idle_blocks += len(chunk.blocks)
        self.num_changes += 1
        return chunk

    def counts(self) -> BlockCounts:
        free, cached, private = self._pool.num_free, self._num_idle_blocks, self._num_private
        return BlockCounts(free, cached, self._pool.num_blocks - free - cached - private, private)

    def check_integrity(self, private: Iterable[int]) -> None:
        """Asserts that every reference of the pool is accounted for, given all private blocks."""
        self._pool.check_integrity()
        held = Counter(private)
        assert all(count == 1 for count in held.values()), "bug: a private block has two owners"
        assert sum(held.values()) == self._num_private, "bug: private blocks are miscounted"
        for chunk in self._chunks.values():
            assert (chunk in self._idle) == (chunk.ready and not chunk.pins), "bug: idle chunks are mislaid"
            assert chunk.pins or chunk.ready, "bug: nobody waits for a chunk that is not ready"
            for block in chunk.blocks:
                held[block] += 1 + chunk.pins
        for chunk in self._dropped:
            assert chunk.pins, "bug: a dropped chunk outlived its pins"
            for block in chunk.blocks:
                held[block] += chunk.pins
        for block in range(self._pool.num_blocks):
            assert self._pool.ref_count(block) == held[block], f"bug: references of block {block} leak"
        adopted = sum(len(chunk.blocks) for chunk in self._chunks.values() if chunk.adopted)
        assert adopted == self.num_adopted_blocks, "bug: adopted blocks are miscounted"
        idle = sum(len(chunk.blocks) for chunk in self._idle)
        assert idle == self._num_idle_blocks, "bug: idle blocks are miscounted"
        pinned = {*self._dropped, *(chunk for chunk in self._chunks.values() if chunk.pins)}
        assert sum(len(chunk.blocks) for chunk in pinned) == self.counts().pinned, "bug: blocks are lost"

    def _find(self, key: str, ref: ChunkRef) -> ResidentChunk | None:
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.ref is not ref and chunk.ref != ref:
            raise InternalServerError(
                f"chunk key {key[:16]} stands for two different token sequences",
                hint="the tenant's secret or the store is damaged: run `memkv store verify --full`",
            )
        return chunk

    def _reserve(self, ref: ChunkRef) -> ResidentChunk:
        chunk = ResidentChunk(ref, self._take(self._kv_cache.layout.blocks_for(ref.num_tokens)))
        self._chunks[ref.input_key] = chunk
        self._hold([chunk])
        self.num_changes += 1
        return chunk

    def _hold(self, chunks: Sequence[ResidentChunk]) -> None:
        """One more pin on each."""
        for chunk in chunks:
            if self._idle.discard(chunk):
                self._num_idle_blocks -= len(chunk.blocks)
            chunk.pins += 1
            chunk.uses += 1
        self._pool.share(_block_ids(chunks))

    def _let_go(self, chunks: Sequence[ResidentChunk], *, cold: bool = False) -> None:
        """One pin less on each."""
        self._pool.release(_block_ids(chunks))
        self.num_changes += 1
        for chunk in reversed(chunks):  # what others stand behind is evicted last
            chunk.pins -= 1
            if chunk.pins:
                continue
            if chunk.dropped:
                self._dropped.discard(chunk)
            elif chunk.ready:
                self._idle.add(chunk, 0.0 if cold else chunk.worth)
                self._num_idle_blocks += len(chunk.blocks)
            else:
                self._remove(chunk)

    def _remove(self, chunk: ResidentChunk) -> None:
        """Takes the cache's own reference away."""
        del self._chunks[chunk.ref.input_key]
        if self._idle.discard(chunk):
            self._num_idle_blocks -= len(chunk.blocks)
        chunk.dropped = True
        if chunk.adopted:
            self.num_adopted_blocks -= len(chunk.blocks)
        if chunk.pins:
            self._dropped.add(chunk)
        self._pool.release(chunk.block_ids)

    def _take(self, num_blocks: int) -> list[int]:
        """Free blocks, evicting idle chunks where there are too few."""
        if num_blocks > self._pool.num_free + self._num_idle_blocks:
            raise PoolExhausted(
                f"{num_blocks} blocks are needed, {self._pool.num_free} are free and "
                f"{self._num_idle_blocks} can be evicted"
            )
        while self._pool.num_free < num_blocks:
            victim = self._idle.pop()
            self._num_idle_blocks -= len(victim.blocks)
            self._remove(victim)
        blocks = self._pool.allocate(num_blocks)
        self._kv_cache.clear(blocks)
        return blocks


def _block_ids(chunks: Sequence[ResidentChunk]) -> NDArray[np.int64]:
    none = np.empty(0, dtype=np.int64)
    return np.concatenate([none, *(chunk.block_ids for chunk in chunks)])
