"""Two engines on CPU devices over one source: routing, and answers as of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_harness import (
    FAKE_VOCAB,
    FakeRunner,
    MemorySource,
    RandomPrompts,
    config,
    fake_answer,
    fake_model,
    wait_until,
)
from test_engine import request_of

from memkv.engine.engine import Engine
from memkv.engine.engines import Engines
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef
from memkv.engine.work import Work
from memkv.errors import EngineClosed, InternalServerError

SIZE = 16


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[FakeRunner]:
    made: list[FakeRunner] = []

    def make(model: object) -> FakeRunner:
        made.append(FakeRunner())
        return made[-1]

    monkeypatch.setattr("memkv.engine.engine.ModelRunner", make)
    return made


@pytest.fixture
def engines(runners: list[FakeRunner]) -> Iterator[Engines]:
    values = config(max_running=4)
    with Engines([Engine(fake_model(), "float32", values, poison=True) for _ in range(2)]) as engines:
        yield engines
        engines.check_integrity()


@pytest.fixture
def prompts() -> RandomPrompts:
    return RandomPrompts(FAKE_VOCAB)


def stored(engines: Engines, prompts: RandomPrompts, count: int) -> tuple[MemorySource, list[ChunkRef]]:
    """Chunks in a source, and in no engine."""
    source = MemorySource()
    chunks = [prompts.chunk(30 + index, f"c{index}") for index in range(count)]
    made = engines.prefill(prompts.prefix, chunks, source, block_size=SIZE)
    source.kept.update({ref.input_key: kv for ref, kv in zip(chunks, made, strict=True)})
    engines.drop([prompts.prefix.input_key, *(chunk.input_key for chunk in chunks)])
    return source, chunks


def num_cached(engines: Engines) -> int:
    return sum(lane.blocks.cached for lane in engines.stats().lanes)


def answered_right(request: GenerateRequest, ids: list[int]) -> bool:
    return ids == fake_answer(request.prompt_ids.tolist(), request.sampling.max_tokens)


def test_chunks_are_dealt_out_and_come_back_in_order(
    engines: Engines, runners: list[FakeRunner], prompts: RandomPrompts
) -> None:
    chunks = [prompts.chunk(20 + index, f"c{index}") for index in range(7)]
    told: list[tuple[int, int]] = []
    source = MemorySource()
    made = engines.prefill(
        prompts.prefix,
        chunks,
        source,
        block_size=SIZE,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert [kv.num_tokens for kv in made] == [chunk.num_tokens for chunk in chunks]
    assert told == [(index, 7) for index in range(1, 8)]
    assert all(runner.batches for runner in runners)
    assert engines.prefill(prompts.prefix, [], source, block_size=SIZE) == []
    source.kept.update({ref.input_key: kv for ref, kv in zip(chunks, made, strict=True)})
    request = request_of(prompts, *chunks)
    assert answered_right(request, engines.generate(request, source).result(10).token_ids)


def test_a_request_goes_where_its_chunks_are(engines: Engines, prompts: RandomPrompts) -> None:
    source, (a, b, c) = stored(engines, prompts, 3)
    with engines.generate(request_of(prompts, a, b, max_tokens=2000), source) as busy:
        next(iter(busy))
        one, other = sorted(engines._engines, key=lambda engine: -engine.num_tasks)
        engines.generate(request_of(prompts, c), source).result(10)  # it was nowhere
        for chunks in ((a, b), (a, b, c), (c,), (b, a)):
            request = request_of(prompts, *chunks)
            assert answered_right(request, engines.generate(request, source).result(10).token_ids)
        assert [each.tokens_here((a, b), SIZE) for each in (one, other)] == [61, 0]
        assert other.tokens_here((c,), SIZE) == 32
    assert source.reads.count("c0") == source.reads.count("c1") == 1


def test_what_is_nowhere_goes_to_the_one_with_the_fewest_requests(
    engines: Engines, runners: list[FakeRunner], prompts: RandomPrompts
) -> None:
    source = MemorySource()
    requests = [request_of(prompts, reuse="off", max_tokens=200) for _ in range(4)]
    generations = [engines.generate(request, source) for request in requests]
    assert [engine.num_tasks for engine in engines._engines] == [2, 2]
    for request, generation in zip(requests, generations, strict=True):
        assert answered_right(request, generation.result(20).token_ids)
    assert all(runner.batches for runner in runners)


def test_an_engine_that_runs_all_it_can_is_passed_over(engines: Engines, prompts: RandomPrompts) -> None:
    source, chunks = stored(engines, prompts, 2)
    engines.generate(request_of(prompts, *chunks), source).result(10)  # now they are on one
    requests = [request_of(prompts, *chunks, max_tokens=300) for _ in range(6)]
    generations = [engines.generate(request, source) for request in requests]
    assert sorted(engine.num_tasks for engine in engines._engines) == [2, 4]
    for request, generation in zip(requests, generations, strict=True):
        assert answered_right(request, generation.result(20).token_ids)


def test_what_is_prefetched_bit_by_bit_fills_all_of_them(engines: Engines, prompts: RandomPrompts) -> None:
    source, chunks = stored(engines, prompts, 4)
    wait_until(lambda: num_cached(engines) == 0)
    cached = -1
    for chunk in chunks:
        wait_until(lambda before=cached: num_cached(engines) > before)  # the state of things is told
        cached = num_cached(engines)
        engines.prefetch((prompts.prefix, chunk), source, block_size=SIZE)
        wait_until(engines.is_idle)
        assert chunk.input_key in source.reads, "it is idle although it has something to read"
    held = [[engine.tokens_here([chunk], SIZE) > 0 for chunk in chunks] for engine in engines._engines]
    assert [sum(each) for each in held] == [2, 2]
    assert all(a != b for a, b in zip(*held, strict=True)), "one is on both, or on none"


def test_what_is_dropped_is_on_none(engines: Engines, prompts: RandomPrompts) -> None:
    source, chunks = stored(engines, prompts, 1)
    engines.prefetch(chunks, source, block_size=SIZE)
    engines.generate(request_of(prompts, *chunks), source).result(10)
    engines.drop([chunks[0].input_key])
    engines.check_integrity()  # behind the drop
    assert [engine.tokens_here(chunks, SIZE) for engine in engines._engines] == [0, 0]


def test_a_part_that_fails_ends_the_others(
    engines: Engines, runners: list[FakeRunner], prompts: RandomPrompts
) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("broken")

    runners[0].before = fail
    chunks = [prompts.chunk(20, f"c{index}") for index in range(6)]
    with pytest.raises(InternalServerError, match="broken"):
        engines.prefill(prompts.prefix, chunks, MemorySource(), block_size=SIZE)
    runners[0].before = None
    engines.check_integrity()
    assert all(engine.num_tasks == 0 for engine in engines._engines)


def test_closed_engines_take_nothing(engines: Engines, prompts: RandomPrompts) -> None:
    assert engines.stats().alive and engines.run(lambda: 3) == 3
    engines.close()
    assert not engines.stats().alive
    with pytest.raises(EngineClosed):
        engines.generate(request_of(prompts), MemorySource())
    with pytest.raises(EngineClosed):
        engines.prefill(prompts.prefix, [prompts.chunk(5)], MemorySource(), block_size=SIZE)


def test_an_engine_that_died_gets_no_questions(engines: Engines, prompts: RandomPrompts) -> None:
    dead = engines._engines[0]

    def fail() -> None:
        raise SystemExit("the device is gone")

    dead._thread._loop_once = fail  # type: ignore[method-assign]
    dead._thread._agenda.post(Work(lambda: None, lambda: ()))
    wait_until(lambda: not dead.stats().alive)
    assert not engines.stats().alive  # and the server says so
    for _ in range(5):
        request = request_of(prompts)
        assert answered_right(request, engines.generate(request, MemorySource()).result(10).token_ids)
