"""Verified chunks in host memory, between the disk and a device that has memory of its own.

    loader's thread     read and verified, or computed ──► put ─┐
    engine's thread     find ───────────────────────────────────┴──► held ──► copied to the device ──► let go

Room is made by eviction, never beyond the budget; what somebody holds stays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from memkv.engine.eviction import EvictionOrder, worth
from memkv.engine.residency import ChunkRef
from memkv.kv.block_pool import BlockPool
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class HostChunk:
    """A chunk in the pool.

    Attributes:
        blocks: rows of `HostPool.storage`, in order.
        holds, uses: who holds it, and who has held it.
    """

    ref: ChunkRef
    blocks: list[int]
    holds: int = 0
    uses: int = 0
    dropped: bool = False

    @property
    def worth(self) -> float:
        return worth(self.uses, self.ref.num_tokens, self.ref.stored_position, len(self.blocks))


@dataclass(frozen=True, slots=True)
class HostCounts:
    """Blocks of a host pool."""

    total: int = 0
    cached: int = 0
    held: int = 0


class HostPool:
    """Of one layout. Any thread may use it.

    Args:
        num_bytes: at most; less than a block is none, and so is what the system does not give.
        pinned: whether a GPU copies from it.

    Attributes:
        storage: [num_blocks, bytes_per_block] uint8.
    """

    def __init__(self, layout: KVLayout, num_bytes: int, *, pinned: bool) -> None:
        self.layout = layout
        self.storage = _storage(num_bytes // layout.bytes_per_block, layout.bytes_per_block, pinned=pinned)
        num_blocks = len(self.storage)
        self._lock = threading.Lock()  # guards what follows
        self._pool = BlockPool(num_blocks) if num_blocks else None
        self._chunks: dict[str, HostChunk] = {}
        self._idle: EvictionOrder[HostChunk] = EvictionOrder()
        self._num_held = 0

    def wants(self, ref: ChunkRef, *, evict: bool = True) -> bool:
        """Whether a chunk is not here and could be. `evict`: others may go for it."""
        with self._lock:
            num_blocks = self.layout.blocks_for(ref.num_tokens)
            return self._has_room(num_blocks, evict) and ref.input_key not in self._chunks

    def find(self, ref: ChunkRef) -> HostChunk | None:
        """A chunk that is here, held. One of the same key and other tokens is not the one."""
        with self._lock:
            chunk = self._chunks.get(ref.input_key)
            if chunk is None or chunk.ref != ref:
                return None
            self._hold(chunk)
            return chunk

    def put(self, ref: ChunkRef, kv: ChunkKV, *, evict: bool = True) -> HostChunk | None:
        """Copies a verified chunk in and holds it. `evict`: others may go for it.

        Returns:
            None where it has no room, is here already, or has another shape than its ref.
        """
        if kv.layout != self.layout or kv.num_tokens != ref.num_tokens:
            return None
        with self._lock:
            if ref.input_key in self._chunks or not self._has_room(kv.num_blocks, evict):
                return None
            self._make_room(kv.num_blocks)
            assert self._pool is not None
            chunk = HostChunk(ref, self._pool.allocate(kv.num_blocks))
            self._hold(chunk)  # found by nobody before its bytes are here
        self.storage.numpy()[chunk.blocks] = kv.rows()
        with self._lock:
            if ref.input_key in self._chunks:
                chunk.dropped = True  # another thread was sooner; whoever holds this one uses it
            else:
                self._chunks[ref.input_key] = chunk
        return chunk

    def let_go(self, chunk: HostChunk, *, forget: bool = False, cold: bool = False) -> None:
        """Undoes one `find` or `put`.

        Args:
            forget: nobody finds it any more.
            cold: nobody asked for it so far; what becomes idle is the first to be evicted.
        """
        with self._lock:
            if forget and not chunk.dropped:
                del self._chunks[chunk.ref.input_key]
                chunk.dropped = True
            chunk.holds -= 1
            if chunk.holds:
                return
            self._num_held -= len(chunk.blocks)
            if chunk.dropped:
                self._free(chunk)
            else:
                self._idle.add(chunk, 0.0 if cold else chunk.worth)

    def touch(self, input_keys: Iterable[str]) -> None:
        """These were used on the device: what is here of them stays as if it had been used here."""
        with self._lock:
            for chunk in filter(None, map(self._chunks.get, input_keys)):
                chunk.uses += 1
                if self._idle.discard(chunk):
                    self._idle.add(chunk, chunk.worth)

    def drop(self, input_keys: set[str]) -> None:
        """Forgets chunks: whoever holds one keeps it, nobody finds it any more."""
        with self._lock:
            for key in input_keys & self._chunks.keys():
                chunk = self._chunks.pop(key)
                chunk.dropped = True
                if self._idle.discard(chunk):
                    self._free(chunk)

    def counts(self) -> HostCounts:
        with self._lock:
            if self._pool is None:
                return HostCounts()
            total, held = self._pool.num_blocks, self._num_held
            return HostCounts(total, total - self._pool.num_free - held, held)

    def check_integrity(self) -> None:
        """Asserts that every block has one owner. Nothing may be on its way in."""
        with self._lock:
            if self._pool is None:
                return
            self._pool.check_integrity()
            idle = sum(len(chunk.blocks) for chunk in self._idle)
            assert idle + self._num_held + self._pool.num_free == self._pool.num_blocks, (
                "bug: blocks of the host pool are lost"
            )
            found = [block for chunk in self._chunks.values() for block in chunk.blocks]
            assert len(set(found)) == len(found), "bug: a block of the host pool has two owners"

    def _hold(self, chunk: HostChunk) -> None:
        self._idle.discard(chunk)
        if chunk.holds == 0:
            self._num_held += len(chunk.blocks)
        chunk.holds += 1
        chunk.uses += 1

    def _has_room(self, num_blocks: int, evict: bool) -> bool:
        if self._pool is None:
            return False
        return num_blocks <= (self._pool.num_blocks - self._num_held if evict else self._pool.num_free)

    def _make_room(self, num_blocks: int) -> None:
        assert self._pool is not None
        while self._pool.num_free < num_blocks:
            chunk = self._idle.pop()
            del self._chunks[chunk.ref.input_key]
            self._free(chunk)

    def _free(self, chunk: HostChunk) -> None:
        assert self._pool is not None
        self._pool.release(chunk.blocks)


def _storage(num_blocks: int, bytes_per_block: int, *, pinned: bool) -> Tensor:
    """[num_blocks, bytes_per_block] uint8, or no blocks."""
    try:
        return torch.empty(
            (num_blocks, bytes_per_block), dtype=torch.uint8, pin_memory=pinned and num_blocks > 0
        )
    except RuntimeError as error:
        _log.warning("no host memory for %d blocks of %d bytes: %s", num_blocks, bytes_per_block, error)
        return torch.empty((0, bytes_per_block), dtype=torch.uint8)
