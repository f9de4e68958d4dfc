"""The host pool: never over its budget, holds always win, and what comes from it is what was read."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import FAKE_LAYOUT, RandomPrompts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lane_driver import Driver
from torch import Tensor

from memkv.engine.host_pool import HostChunk, HostPool
from memkv.engine.residency import ChunkRef
from memkv.errors import BadRequestError
from memkv.kv.chunk import ChunkKV

PROMPTS = RandomPrompts(1000)
REFS = [PROMPTS.chunk(tokens, key=f"c{tokens}") for tokens in (1, 15, 16, 17, 33, 60, 100)]
BLOCK = FAKE_LAYOUT.bytes_per_block


def kv_of(ref: ChunkRef) -> ChunkKV:
    """Bytes that tell whose they are."""
    random = np.random.default_rng(abs(hash(ref.token_ids)))
    data = random.integers(0, 256, FAKE_LAYOUT.bytes_for(ref.num_tokens), dtype=np.uint8)
    return ChunkKV(FAKE_LAYOUT, ref.num_tokens, data.tobytes())


def holds_bytes_of(pool: HostPool, chunk: HostChunk) -> bool:
    return bool((pool.storage.numpy()[chunk.blocks] == kv_of(chunk.ref).rows()).all())


def test_a_pool_that_the_system_does_not_pin_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    pool = HostPool(FAKE_LAYOUT, 100 * BLOCK, pinned=True)
    assert pool.counts().total == 0
    assert not pool.wants(REFS[0]) and pool.put(REFS[0], kv_of(REFS[0])) is None


class HostPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(0, 12))
    def make(self, num_blocks: int) -> None:
        self.pool = HostPool(FAKE_LAYOUT, num_blocks * BLOCK + 1, pinned=False)
        self.num_blocks = num_blocks
        self.held: list[HostChunk] = []

    @rule(ref=st.sampled_from(REFS))
    def get(self, ref: ChunkRef) -> None:
        wanted = self.pool.wants(ref)
        found = self.pool.find(ref)
        assert not (wanted and found)
        if found is None:
            found = self.pool.put(ref, kv_of(ref))
            assert (found is not None) == wanted
        if found is not None:
            self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), forget=st.booleans())
    def let_go(self, data: st.DataObject, forget: bool) -> None:
        chunk = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.let_go(chunk, forget=forget)
        found = self.pool.find(chunk.ref)
        if forget:
            assert found is not chunk
        if found is not None:
            self.held.append(found)

    @rule(ref=st.sampled_from(REFS))
    def put_where_there_is_room(self, ref: ChunkRef) -> None:
        wanted = self.pool.wants(ref, evict=False)
        before = self.pool.counts()
        found = self.pool.put(ref, kv_of(ref), evict=False)
        assert (found is not None) == wanted
        assert self.pool.counts().cached == before.cached, "something was evicted for it"
        if found is not None:
            self.held.append(found)

    @rule(refs=st.sets(st.sampled_from(REFS)))
    def touch(self, refs: set[ChunkRef]) -> None:
        before = self.pool.counts()
        self.pool.touch(ref.input_key for ref in refs)
        assert self.pool.counts() == before

    @rule(ref=st.sampled_from(REFS))
    def drop(self, ref: ChunkRef) -> None:
        self.pool.drop({ref.input_key})
        assert self.pool.find(ref) is None

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        counts = self.pool.counts()
        assert counts.total == self.num_blocks
        assert counts.held == sum(len(chunk.blocks) for chunk in set(self.held))
        assert counts.cached + counts.held <= counts.total
        assert all(holds_bytes_of(self.pool, chunk) for chunk in self.held)


TestHostPoolMachine = HostPoolMachine.TestCase
TestHostPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_same_key_for_other_tokens_is_not_found() -> None:
    pool = HostPool(FAKE_LAYOUT, 8 * BLOCK, pinned=False)
    assert pool.put(REFS[2], kv_of(REFS[2])) is not None
    assert pool.find(PROMPTS.chunk(16, key=REFS[2].input_key)) is None


def test_what_is_used_more_stays_longer() -> None:
    pool = HostPool(FAKE_LAYOUT, 4 * BLOCK, pinned=False)
    often, once, late = (PROMPTS.chunk(32, key) for key in ("often", "once", "late"))
    for ref in (often, once):
        chunk = pool.put(ref, kv_of(ref))
        assert chunk is not None
        pool.let_go(chunk)
    for _ in range(2):
        chunk = pool.find(often)
        assert chunk is not None
        pool.let_go(chunk)
    assert pool.put(late, kv_of(late)) is not None
    assert pool.find(once) is None and pool.find(often) is not None


def test_threads_that_put_find_and_drop_at_once_lose_nothing() -> None:
    pool = HostPool(FAKE_LAYOUT, 20 * BLOCK, pinned=False)
    failures: list[AssertionError] = []

    def work(seed: int) -> None:
        random = Random(seed)
        try:
            for _ in range(300):
                ref = random.choice(REFS)
                chunk = pool.find(ref) or pool.put(ref, kv_of(ref))
                if chunk is not None:
                    assert holds_bytes_of(pool, chunk)
                    pool.let_go(chunk, forget=random.random() < 0.1)
                if random.random() < 0.1:
                    pool.drop({ref.input_key})
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.check_integrity()
    assert pool.counts().held == 0


# A lane with a host pool


@pytest.fixture
def driver() -> Driver:
    """Blocks for one of its chunks at a time; host memory for all."""
    driver = Driver(num_blocks=9, host_bytes=40 * BLOCK)
    driver.store(*chunks_of(driver))
    return driver


def chunks_of(driver: Driver) -> list[ChunkRef]:
    return [ChunkRef(f"chunk {i}", driver.prompts.prefix.token_ids, ids(i)) for i in range(3)]


def ids(seed: int) -> tuple[int, ...]:
    return RandomPrompts(1000, seed=50 + seed).ids(90)


def test_what_was_evicted_comes_back_from_host_memory(driver: Driver) -> None:
    for _ in range(3):
        for chunk in chunks_of(driver):
            driver.finish(driver.submit(chunk))
    assert sorted(driver.source.reads) == ["chunk 0", "chunk 1", "chunk 2", "prefix"]
    assert driver.lane.stats().host_blocks.cached == 1 + 3 * 6
    assert driver.lane.stats().host_blocks.held == 0
    driver.assert_idle()


def test_without_host_memory_it_is_read_again() -> None:
    driver = Driver(num_blocks=9)
    driver.store(*chunks_of(driver))
    for _ in range(2):
        for chunk in chunks_of(driver):
            driver.finish(driver.submit(chunk))
    assert driver.source.reads.count("chunk 0") == 2


def computed(driver: Driver, *chunks: ChunkRef) -> None:
    """By a job, as an ingest has them computed; nothing keeps them on disk."""
    driver.submit_job(*chunks)
    driver.run()
    for chunk in chunks:
        driver.source.kept.pop(chunk.input_key, None)


def test_what_a_job_computed_comes_back_from_host_memory(driver: Driver) -> None:
    chunks = chunks_of(driver)
    computed(driver, *chunks)
    assert sum(driver.lane.residency.knows(chunk) for chunk in chunks) == 1, "blocks for one alone"
    for chunk in chunks:
        driver.finish(driver.submit(chunk))
    assert driver.source.reads == ["prefix"]
    assert driver.lane.stats().healed_chunks == 0
    driver.assert_idle()


def test_what_was_healed_comes_back_from_host_memory(driver: Driver) -> None:
    first, second, _ = chunks_of(driver)
    del driver.source.kept[first.input_key]
    driver.finish(driver.submit(first))
    del driver.source.kept[first.input_key]  # it was written back
    for chunk in (second, first):
        driver.finish(driver.submit(chunk))
    assert driver.source.reads.count(first.input_key) == 1
    assert driver.lane.stats().healed_chunks == 1


def test_what_a_job_computes_takes_only_free_room_and_goes_first() -> None:
    driver = Driver(num_blocks=9, host_bytes=14 * BLOCK)  # of two chunks beside the prefix
    first, second, third = chunks_of(driver)
    driver.store(first, second, third)
    computed(driver, second, third)
    host = driver.lane.host_pool
    assert [host.wants(chunk, evict=False) for chunk in (second, third)] == [False, False]
    driver.finish(driver.submit(first))  # takes the place of one that nobody asked for
    found = [host.find(chunk) for chunk in (first, second, third)]
    assert [each is not None for each in found] == [True, False, True]
    for each in found:
        if each is not None:
            host.let_go(each)
    computed(driver, second)
    assert host.find(second) is None, "what was asked for had to go for it"


def test_what_is_dropped_on_its_way_from_the_device_leaves_nothing(driver: Driver) -> None:
    first = chunks_of(driver)[0]
    driver.finish(driver.submit())  # the prefix is there
    driver.loader.hold = True
    driver.submit_job(first)
    driver.run()
    driver.lane.drop([first.input_key])
    driver.loader.come_back()
    driver.run()
    assert driver.lane.host_pool.find(first) is None
    driver.assert_idle()


def test_who_asks_for_it_on_its_way_from_the_device_waits_for_it(driver: Driver) -> None:
    first = chunks_of(driver)[0]
    driver.finish(driver.submit())
    driver.loader.hold = True
    computed(driver, first)
    driver.lane.residency.drop([first.input_key])  # as an eviction does
    asked = driver.submit(first)
    driver.settle()
    driver.loader.come_back()
    driver.finish(asked)
    assert driver.source.reads == ["prefix"]


def test_what_is_used_on_the_device_stays_in_host_memory_too() -> None:
    driver = Driver(num_blocks=40, host_bytes=20 * BLOCK)  # of three chunks there, beside the prefix
    often, *others = (driver.prompts.chunk(90, f"c{index}") for index in range(8))
    driver.store(often, *others)
    for chunk in others:
        driver.finish(driver.submit(often, chunk))  # it is read once, and always on the device
    assert driver.source.reads.count(often.input_key) == 1
    kept = driver.lane.host_pool.find(often)
    assert kept is not None, "it went before what was asked for once"
    driver.lane.host_pool.let_go(kept)
    driver.lane.residency.drop([often.input_key])
    driver.finish(driver.submit(often))
    assert driver.source.reads.count(often.input_key) == 1


def test_what_is_dropped_leaves_host_memory_too(driver: Driver) -> None:
    first, second, _ = chunks_of(driver)
    driver.finish(driver.submit(first))
    driver.lane.drop([first.input_key])
    driver.finish(driver.submit(second))
    driver.finish(driver.submit(first))
    assert driver.source.reads.count("chunk 0") == 2


@pytest.mark.parametrize("prefetch", [False, True])
def test_what_is_dropped_while_it_is_read_leaves_nothing(driver: Driver, prefetch: bool) -> None:
    first = chunks_of(driver)[0]
    driver.loader.hold = True
    if prefetch:
        driver.lane.prefetch([first], driver.source)
    else:
        sequence = driver.submit(first)
    driver.settle()
    driver.lane.drop([first.input_key])
    driver.loader.come_back()
    if not prefetch:
        driver.finish(sequence)
    driver.settle()
    assert driver.lane.host_pool.find(first) is None
    assert not driver.lane.residency.knows(first)
    driver.assert_idle()


def test_a_prefetched_chunk_is_read_once_and_there_when_it_is_asked_for(driver: Driver) -> None:
    first = chunks_of(driver)[0]
    driver.loader.hold = True
    driver.lane.prefetch([first], driver.source)
    sequence = driver.submit(first)
    driver.settle()
    assert sorted(driver.source.reads) == []
    assert [key for key, _ in driver.loader.pending] == ["chunk 0", "prefix"]
    driver.loader.come_back()
    driver.finish(sequence)
    driver.assert_idle()


def test_what_is_prefetched_for_host_memory_takes_no_blocks(driver: Driver) -> None:
    first = chunks_of(driver)[0]
    driver.lane.prefetch([first], driver.source, to_host=True)
    driver.settle()
    assert not driver.lane.residency.knows(first)
    driver.finish(driver.submit(first))
    assert driver.source.reads.count("chunk 0") == 1
    driver.assert_idle()


def test_what_is_prefetched_and_not_asked_for_is_idle(driver: Driver) -> None:
    first = chunks_of(driver)[0]
    driver.lane.prefetch(
        [first, PROMPTS.chunk(20, "missing"), PROMPTS.chunk(5000, "too long")], driver.source
    )
    driver.settle()
    assert driver.lane.residency.counts().cached == 6
    driver.assert_idle()
    driver.finish(driver.submit(first))
    assert driver.source.reads.count("chunk 0") == 1


def test_while_requests_wait_for_blocks_chunks_are_read_into_host_memory(driver: Driver) -> None:
    first, second, third = chunks_of(driver)
    running = driver.submit(first, max_tokens=20)
    driver.settle()
    waiting = [driver.submit(chunk) for chunk in (second, third)]
    driver.settle()
    assert driver.lane.scheduler.waiting
    driver.settle()
    assert driver.lane.residency.knows(second) is False
    held = driver.lane.host_pool.find(third)
    assert held is not None  # it came after one that waited already
    driver.lane.host_pool.let_go(held)
    for sequence in (running, *waiting):
        driver.finish(sequence)
    assert driver.source.reads.count("chunk 2") == 1
    driver.assert_idle()


def test_a_chunk_that_is_on_its_way_to_host_memory_is_not_read_twice(driver: Driver) -> None:
    first, second, third = chunks_of(driver)
    running = driver.submit(first, max_tokens=2)
    driver.settle()
    waiting = driver.submit(second)
    driver.settle()
    driver.loader.hold = True
    late = driver.submit(third)
    driver.settle()
    assert [key for key, _ in driver.loader.pending] == ["chunk 2"]
    driver.finish(running)  # now the others have blocks, one after the other
    driver.loader.come_back("chunk 1")
    driver.run()
    assert [key for key, _ in driver.loader.pending] == ["chunk 2"]
    driver.loader.come_back()
    driver.finish(waiting)
    driver.finish(late)
    assert driver.source.reads.count("chunk 2") == 1
    driver.assert_idle()


def test_who_gave_up_while_it_was_on_its_way_to_host_memory_overwrites_nobody(driver: Driver) -> None:
    first = chunks_of(driver)[0]
    driver.finish(driver.submit())  # the prefix is there
    driver.loader.hold = True
    driver.lane.prefetch([first], driver.source, to_host=True)
    asked = driver.submit(first)
    driver.settle()
    assert asked in driver.lane.scheduler.loading
    driver.lane.cancel(asked)
    driver.settle()
    other = driver.submit(tail=7 * FAKE_LAYOUT.block_size, max_tokens=3)
    driver.settle()
    driver.loader.come_back()
    driver.finish(other)
    driver.assert_idle()
    driver.finish(driver.submit(first))
    assert driver.source.reads.count("chunk 0") == 1


def test_a_source_that_fails_a_prefetch_fails_nobody_and_is_asked_again(driver: Driver) -> None:
    first = chunks_of(driver)[0]

    def fails(ref: ChunkRef) -> ChunkKV | None:
        raise BadRequestError("no")

    driver.source.on_read = fails
    driver.lane.prefetch([first], driver.source)
    driver.settle()
    driver.assert_idle()
    driver.source.on_read = None
    driver.finish(driver.submit(first))
