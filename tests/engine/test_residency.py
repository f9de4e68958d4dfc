"""Residency: pins, eviction and deletion in any order; every block is always accounted for."""

from __future__ import annotations

import itertools

import pytest
from engine_harness import FAKE_LAYOUT, RandomPrompts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from memkv.engine.kv_cache import KVCache
from memkv.engine.residency import ChunkRef, Pin, Residency
from memkv.errors import InternalServerError, PoolExhausted
from memkv.kv.block_pool import BlockPool

PROMPTS = RandomPrompts(1000)
NUMBERS = itertools.count()
REFS = [PROMPTS.chunk(tokens, key=f"c{tokens}") for tokens in (1, 15, 16, 17, 33, 60, 100, 5, 48)]


def residency_of(num_blocks: int) -> Residency:
    return Residency(KVCache(FAKE_LAYOUT, num_blocks), BlockPool(num_blocks))


def blocks_of(ref: ChunkRef) -> int:
    return FAKE_LAYOUT.blocks_for(ref.num_tokens)


class ResidencyMachine(RuleBasedStateMachine):
    pins: Bundle[Pin] = Bundle("pins")
    private: Bundle[list[int]] = Bundle("private")

    @initialize(num_blocks=st.integers(4, 30))
    def make(self, num_blocks: int) -> None:
        self.residency = residency_of(num_blocks)
        self.num_blocks = num_blocks
        self.private_held: list[int] = []
        self.live: list[Pin] = []

    @rule(target=pins, refs=st.lists(st.sampled_from(REFS), max_size=5))
    def pin(self, refs: list[ChunkRef]) -> Pin:
        fits = self.residency.fits(refs)
        before = self.residency.counts()
        try:
            pin = self.residency.pin(refs)
        except PoolExhausted:
            assert not fits
            assert self.residency.counts().pinned == before.pinned
            return self.residency.pin([])
        assert fits
        assert [chunk.ref for chunk in pin.chunks] == list(dict.fromkeys(refs))
        assert all(len(chunk.blocks) == blocks_of(chunk.ref) for chunk in pin.chunks)
        self.live.append(pin)
        return pin

    @rule(pin=pins, index=st.integers(0, 4))
    def fill(self, pin: Pin, index: int) -> None:
        if pin in self.live and index < len(pin.chunks):
            self.residency.ready(pin.chunks[index])

    @rule(target=pins, pin=pins)
    def hold(self, pin: Pin) -> Pin:
        if pin not in self.live or not pin.chunks:
            return self.residency.pin([])
        held = self.residency.hold(pin.chunks[0])
        self.live.append(held)
        return held

    @rule(pin=consumes(pins), cold=st.booleans())
    def release(self, pin: Pin, cold: bool) -> None:
        pin.release(cold=cold)
        pin.release()
        if pin in self.live:
            self.live.remove(pin)

    @rule(refs=st.lists(st.sampled_from(REFS), max_size=3))
    def drop(self, refs: list[ChunkRef]) -> None:
        self.residency.drop(ref.input_key for ref in refs)

    @rule(target=private, wanted=st.integers(0, 12))
    def allocate(self, wanted: int) -> list[int]:
        fits = self.residency.fits([], wanted)
        try:
            blocks = self.residency.allocate(wanted)
        except PoolExhausted:
            assert not fits
            return []
        assert fits
        self.private_held += blocks
        return blocks

    @rule(blocks=consumes(private))
    def give_back(self, blocks: list[int]) -> None:
        self.residency.release(blocks)
        for block in blocks:
            self.private_held.remove(block)

    @rule(blocks=consumes(private), drop=st.booleans(), pin=st.booleans())
    def adopt(self, blocks: list[int], drop: bool, pin: bool) -> None:
        if not blocks:
            return
        ref = PROMPTS.chunk(len(blocks) * FAKE_LAYOUT.block_size, key=f"run {next(NUMBERS)}")
        chunk = self.residency.adopt(ref, blocks)
        for block in blocks:
            self.private_held.remove(block)
        if pin:
            self.live.append(self.residency.pin([ref]))
            assert self.live[-1].chunks == [chunk] and self.live[-1].is_ready
        if drop:
            self.residency.drop([ref.input_key])

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "residency"):
            return
        self.residency.check_integrity(self.private_held)
        counts = self.residency.counts()
        assert counts.total == self.num_blocks
        pinned = {block for pin in self.live for chunk in pin.chunks for block in chunk.blocks}
        assert counts.pinned == len(pinned)
        assert pinned.isdisjoint(self.private_held)
        owners: dict[int, ChunkRef] = {}  # nothing pinned was given to somebody else
        for chunk in {chunk for pin in self.live for chunk in pin.chunks}:
            for block in chunk.blocks:
                assert owners.setdefault(block, chunk.ref) is chunk.ref

    def teardown(self) -> None:
        if not hasattr(self, "residency"):
            return
        for pin in self.live:
            pin.release()
        self.residency.release(self.private_held)
        self.residency.check_integrity([])
        counts = self.residency.counts()
        assert counts.free + counts.cached == self.num_blocks


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def fill(residency: Residency, *refs: ChunkRef) -> None:
    for ref in refs:
        with residency.pin([ref]) as pin:
            residency.ready(pin.chunks[0])


def resident(residency: Residency, *refs: ChunkRef) -> list[bool]:
    """Looks without changing the order of eviction: a dropped pin of what is missing leaves no trace."""
    return [ref.input_key in residency._chunks for ref in refs]


def test_the_chunk_that_was_used_longest_ago_goes_first() -> None:
    a, b, c = (PROMPTS.chunk(32, key) for key in "abc")
    residency = residency_of(6)
    fill(residency, a, b, c)
    fill(residency, a)  # used again
    residency.allocate(1)
    assert resident(residency, a, b, c) == [True, False, True]


def test_a_cold_chunk_goes_before_all_others() -> None:
    a, b = PROMPTS.chunk(32, "a"), PROMPTS.chunk(32, "b")
    residency = residency_of(4)
    fill(residency, a)
    pin = residency.pin([b])
    residency.ready(pin.chunks[0])
    pin.release(cold=True)
    residency.allocate(1)
    assert resident(residency, a, b) == [True, False]


def test_making_room_for_one_chunk_does_not_evict_another_of_the_same_pin() -> None:
    a, b, c = (PROMPTS.chunk(32, key) for key in "abc")
    residency = residency_of(4)
    fill(residency, a, b)
    with residency.pin([a, c]) as pin:  # a is the coldest
        assert [chunk.ref for chunk in pin.chunks] == [a, c]
        assert pin.reserved == [pin.chunks[1]]
        assert resident(residency, a, b, c) == [True, False, True]


def test_pinned_chunks_are_never_evicted() -> None:
    a = PROMPTS.chunk(32, "a")
    residency = residency_of(4)
    pin = residency.pin([a])
    residency.ready(pin.chunks[0])
    assert not residency.fits([], 3)
    with pytest.raises(PoolExhausted, match="3 blocks are needed, 2 are free"):
        residency.allocate(3)
    with pytest.raises(PoolExhausted):
        residency.pin([PROMPTS.chunk(48, "b")])
    residency.check_integrity([])
    pin.release()
    assert len(residency.allocate(3)) == 3


def test_a_dropped_chunk_lives_until_its_last_pin_and_is_not_found_again() -> None:
    a = PROMPTS.chunk(32, "a")
    residency = residency_of(8)
    pin = residency.pin([a])
    residency.ready(pin.chunks[0])
    residency.drop(["a", "unknown"])
    other = residency.pin([a])
    assert other.reserved and set(other.chunks[0].blocks).isdisjoint(pin.chunks[0].blocks)
    assert residency.counts().pinned == 4
    pin.release()
    assert residency.counts().pinned == 2
    other.release()
    assert residency.counts().free == 8


def test_a_chunk_that_nobody_waits_for_any_more_is_not_kept_unfilled() -> None:
    a = PROMPTS.chunk(32, "a")
    residency = residency_of(4)
    first, second = residency.pin([a]), residency.pin([a])
    assert second.reserved == []  # one fills it for both
    first.release()
    assert residency.counts().pinned == 2
    second.release()
    assert residency.counts().free == 4


def test_the_same_key_for_other_tokens_is_refused() -> None:
    a = PROMPTS.chunk(32, "a")
    residency = residency_of(4)
    fill(residency, a)
    with pytest.raises(InternalServerError, match="two different token sequences"):
        residency.pin([PROMPTS.chunk(32, "a")])
    residency.check_integrity([])
