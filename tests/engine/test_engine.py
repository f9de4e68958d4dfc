"""The engine and its thread, over a model whose answers tell what it saw."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine_harness import (
    FAKE_EOS,
    FAKE_VOCAB,
    FakeRunner,
    Letters,
    MemorySource,
    RandomPrompts,
    config,
    fake_answer,
    fake_model,
    wait_until,
)

from memkv.engine.engine import Engine
from memkv.engine.generation import Generation, TokenEvent
from memkv.engine.kv_cache import Export
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import Map
from memkv.engine.sampler import Sampling
from memkv.errors import (
    APITimeoutError,
    BadRequestError,
    ConfigError,
    ContextTooLong,
    EngineClosed,
    InternalServerError,
    LayoutError,
    MemKVError,
    Overloaded,
    ReuseUnavailable,
)
from memkv.kv.chunk import ChunkKV

BLOCK_BYTES = 2 * 8 * 16 * 4  # K and V, head dim, slots, float32

MakeEngine = Callable[..., Engine]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    runner = FakeRunner()
    monkeypatch.setattr("memkv.engine.engine.ModelRunner", lambda model: runner)
    return runner


@pytest.fixture
def make_engine(runner: FakeRunner) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(num_blocks: int = 64, max_context: int = 4096, **changes: Any) -> Engine:
        values = config(pool_bytes=num_blocks * BLOCK_BYTES, **changes)
        engines.append(Engine(fake_model(max_context), "float32", values, poison=True))
        return engines[-1]

    yield make
    runner.before = None
    for engine in engines:
        engine.close()
        engine.check_integrity()
        for lane in engine.stats().lanes:
            assert lane.blocks.free + lane.blocks.cached == lane.blocks.total


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def prompts() -> RandomPrompts:
    return RandomPrompts(FAKE_VOCAB)


def request_of(prompts: RandomPrompts, *chunks: ChunkRef, tail: int = 5, **changes: Any) -> GenerateRequest:
    names = ("max_tokens", "stop", "ignore_eos", "temperature", "seed")
    sampling = {name: changes.pop(name) for name in names if name in changes}
    values = {"policy": Map(), "sampling": Sampling(**{"max_tokens": 4, **sampling}), **changes}
    return GenerateRequest(prompts.prefix, chunks, prompts.ids(tail), **values)


def check(request: GenerateRequest, generation: Generation) -> None:
    result = generation.result(30)
    count = len(result.token_ids)
    assert result.token_ids == fake_answer(request.prompt_ids.tolist(), count)
    if result.finish_reason == "length":
        assert count == request.sampling.max_tokens


# Answers


def test_tokens_stream_as_each_step_ends(
    engine: Engine, runner: FakeRunner, prompts: RandomPrompts, runs_ahead: bool
) -> None:
    steps = threading.Semaphore(0)
    runner.before = lambda batch: steps.acquire() and None
    request = request_of(prompts, max_tokens=3, decoder=Letters)
    generation = engine.generate(request, MemorySource())
    events = iter(generation)
    steps.release(2 + runs_ahead)  # the prefix, the prompt, and what is submitted before its token is here
    first = next(events)
    assert isinstance(first, TokenEvent) and first.text == chr(ord("a") + first.token_id % 26)
    assert generation.finish_reason is None
    steps.release(2 - runs_ahead)
    rest = list(events)
    result = generation.result(5)
    assert [first.token_id, *(event.token_id for event in rest)] == result.token_ids
    assert "".join(event.text for event in (first, *rest)) == result.text
    assert result.finish_reason == "length" == generation.finish_reason
    assert list(generation) == [first, *rest]  # a second look sees them all
    check(request, generation)


def test_timings_add_up(engine: Engine, prompts: RandomPrompts) -> None:
    timings = engine.generate(request_of(prompts), MemorySource()).result(5).timings
    assert 0 <= timings.queue_ms <= timings.ttft_ms <= timings.total_ms < 10_000
    parts = timings.queue_ms + timings.load_ms + timings.prefill_ms
    assert parts == pytest.approx(timings.ttft_ms, abs=1e-6)


def test_the_end_of_text_ends_an_answer_and_is_no_text(
    engine: Engine, runner: FakeRunner, prompts: RandomPrompts
) -> None:
    run = runner.run

    def end(batch: Any, cache: Any) -> Any:
        result = run(batch, cache)
        if result.logits is not None and len(runner.batches) >= 4:
            result.logits[:, FAKE_EOS] = 100.0
        return result

    runner.run = end  # type: ignore[method-assign]
    result = engine.generate(request_of(prompts, max_tokens=9, decoder=Letters), MemorySource()).result(5)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] == FAKE_EOS
    assert result.usage.completion_tokens == len(result.token_ids) == len(result.text) + 1
    on = engine.generate(request_of(prompts, max_tokens=9, ignore_eos=True), MemorySource()).result(5)
    assert (on.finish_reason, len(on.token_ids)) == ("length", 9)


def test_a_stop_text_ends_an_answer_and_never_reaches_the_consumer(
    engine: Engine, prompts: RandomPrompts
) -> None:
    request = request_of(prompts, max_tokens=12, decoder=Letters)
    text = "".join(chr(ord("a") + token % 26) for token in fake_answer(request.prompt_ids.tolist(), 12))
    stop = text[4:7]
    stopped = replace(request, sampling=Sampling(max_tokens=12, stop=("never", stop)))
    generation = engine.generate(stopped, MemorySource())
    out = "".join(event.text for event in generation)
    assert out == text[: text.index(stop)] == generation.result().text
    assert generation.result().finish_reason == "stop"
    assert len(generation.result().token_ids) == text.index(stop) + 3


def test_a_seed_repeats_whatever_runs_beside_it(engine: Engine, prompts: RandomPrompts) -> None:
    request = request_of(prompts, temperature=2.0, seed=7, max_tokens=10)
    alone = engine.generate(request, MemorySource()).result(10)
    others = [
        engine.generate(request_of(prompts, temperature=2.0, max_tokens=30), MemorySource()) for _ in range(5)
    ]
    again = engine.generate(request, MemorySource()).result(10)
    assert alone.token_ids == again.token_ids
    for other in others:
        other.result(10)


def test_logits_are_kept_where_asked_for(engine: Engine, prompts: RandomPrompts) -> None:
    request = request_of(prompts, tail=8, max_tokens=3, keep_logits=5)
    result = engine.generate(request, MemorySource()).result(5)
    assert result.logits is not None and result.logits.shape == (7, FAKE_VOCAB)
    last = request.prompt_tokens - 1
    assert result.logit_positions == tuple(range(last - 4, last + 3))
    ids = request.prompt_ids.tolist() + result.token_ids
    for row, position in zip(result.logits, result.logit_positions, strict=True):
        assert int(row.argmax()) == fake_answer(ids[: position + 1], 1)[0]
    assert engine.generate(request_of(prompts), MemorySource()).result(5).logits is None


def test_each_block_size_has_its_own_lane(engine: Engine, prompts: RandomPrompts) -> None:
    source = {size: MemorySource() for size in (8, 16, 32)}
    requests = {size: request_of(prompts, prompts.chunk(40), block_size=size) for size in (8, 16, 32)}
    generations = {size: engine.generate(requests[size], source[size]) for size in requests}
    for size, generation in generations.items():
        check(requests[size], generation)
    lanes = engine.stats().lanes
    assert sorted(lane.block_size for lane in lanes) == [8, 16, 32]
    assert {lane.blocks.total * lane.block_size for lane in lanes} == {64 * 16}


def test_chunks_of_an_ingest_come_back_in_order_with_progress(engine: Engine, prompts: RandomPrompts) -> None:
    chunks = [prompts.chunk(20 + index) for index in range(7)]
    source, progress = MemorySource(), []
    kvs = engine.prefill(
        prompts.prefix,
        chunks,
        source,
        block_size=16,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert [kv.num_tokens for kv in kvs] == [20 + index for index in range(7)]
    assert progress == [(index + 1, 7) for index in range(7)]
    wait_until(lambda: source.writes == ["prefix"])
    for ref, kv in zip(chunks, kvs, strict=True):
        source.kept[ref.input_key] = kv
    engine.drop(ref.input_key for ref in chunks)
    request = request_of(prompts, *reversed(chunks))
    generation = engine.generate(request, source)
    check(request, generation)
    assert generation.result().usage.healed_chunks == 0
    assert engine.prefill(prompts.prefix, [], source, block_size=16) == []


def test_a_query_does_not_wait_for_a_whole_ingest(
    make_engine: MakeEngine, runner: FakeRunner, prompts: RandomPrompts
) -> None:
    engine = make_engine(num_blocks=400)
    runner.before = lambda batch: time.sleep(0.0005 * batch.num_tokens)
    chunks = [prompts.chunk(100) for _ in range(40)]  # two seconds
    source, done = MemorySource(), threading.Event()

    def ingest() -> None:
        engine.prefill(prompts.prefix, chunks, source, block_size=16)
        done.set()

    thread = threading.Thread(target=ingest)
    thread.start()
    wait_until(lambda: any(lane.counters.fill_steps > 1 for lane in engine.stats().lanes))
    request = request_of(prompts, max_tokens=3)
    generation = engine.generate(request, source)
    check(request, generation)
    assert not done.is_set()
    thread.join(30)
    assert done.is_set()


# Refused at once


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tail": 0}, "no tail"),
        ({"reuse": "never"}, "reuse"),
        ({"stop": ("x",)}, "decoder"),
        ({"keep_logits": -1}, "keep_logits"),
        ({"keep_logits": 10_000}, "keep_logits"),
        ({"queue_seconds": -1.0}, "queue_seconds"),
        ({"queue_seconds": float("nan")}, "queue_seconds"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    engine: Engine, prompts: RandomPrompts, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequestError, match=message):
        engine.generate(request_of(prompts, **changes), MemorySource())


def test_chunks_that_do_not_belong_there_are_refused(engine: Engine, prompts: RandomPrompts) -> None:
    prefix = prompts.prefix
    good = prompts.chunk(20)
    bad = {
        "another prefix": ChunkRef("x", prefix.token_ids[:-1], good.token_ids),
        "no tokens": ChunkRef("x", prefix.token_ids, ()),
        "vocabulary": ChunkRef("x", prefix.token_ids, (5, FAKE_VOCAB)),
        "from -1": ChunkRef("x", prefix.token_ids, (5, -1)),
    }
    for message, ref in bad.items():
        with pytest.raises(BadRequestError, match=message):
            engine.generate(request_of(prompts, good, ref), MemorySource())
        with pytest.raises(BadRequestError, match=message):
            engine.prefill(prefix, [good, ref], MemorySource(), block_size=16)
    with pytest.raises(BadRequestError, match="context"):
        engine.prefill(good, [], MemorySource(), block_size=16)
    with pytest.raises(LayoutError):
        engine.generate(request_of(prompts, block_size=12), MemorySource())


def test_what_can_never_fit_is_refused_at_once_even_while_a_step_runs(
    engine: Engine, runner: FakeRunner, prompts: RandomPrompts
) -> None:
    gate = threading.Event()
    runner.before = lambda batch: gate.wait(10) and None
    busy = engine.generate(request_of(prompts), MemorySource())
    with pytest.raises(ContextTooLong, match="needs 65 blocks of 16 tokens, the whole pool has 64") as caught:
        engine.generate(request_of(prompts, reuse="off", tail=64 * 16 - 13, max_tokens=2), MemorySource())
    assert f"at least {65 * BLOCK_BYTES}" in caught.value.hint
    with pytest.raises(ContextTooLong, match="4110 prompt tokens"):
        engine.generate(request_of(prompts, tail=4097, max_tokens=1), MemorySource())
    with pytest.raises(ContextTooLong, match="needs 65"):
        engine.prefill(prompts.prefix, [prompts.chunk(64 * 16)], MemorySource(), block_size=16)
    seconds = []
    for _ in range(5):
        started = time.monotonic()
        with pytest.raises(ContextTooLong):
            engine.generate(request_of(prompts, tail=4097, max_tokens=1), MemorySource())
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 0.1
    assert busy.finish_reason is None
    gate.set()
    busy.result(5)


def test_the_largest_that_fits_is_served(make_engine: MakeEngine, prompts: RandomPrompts) -> None:
    engine = make_engine(max_context=64 * 16 + 1)
    request = request_of(prompts, reuse="off", tail=64 * 16 - 13, max_tokens=1)
    check(request, engine.generate(request, MemorySource()))
    with pytest.raises(ContextTooLong, match="1025"):
        engine.generate(request_of(prompts, reuse="off", tail=64 * 16 - 13, max_tokens=2), MemorySource())


def test_an_engine_needs_a_kv_dtype_that_kernels_read(runner: FakeRunner) -> None:
    with pytest.raises(ConfigError, match="float16"):
        Engine(fake_model(), "float16", config())


# Failures


def test_a_request_that_fails_raises_for_result_and_iteration(engine: Engine, prompts: RandomPrompts) -> None:
    generation = engine.generate(request_of(prompts, reuse="strict"), MemorySource())
    with pytest.raises(ReuseUnavailable):
        list(generation)
    with pytest.raises(ReuseUnavailable):
        generation.result(5)
    assert generation.finish_reason == "error"
    generation.cancel()  # nothing happens


def test_a_failed_step_leaves_the_engine_alive(
    engine: Engine, runner: FakeRunner, prompts: RandomPrompts
) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("no luck")

    runner.before = fail
    doomed = engine.generate(request_of(prompts), MemorySource())
    with pytest.raises(InternalServerError, match="no luck"):
        doomed.result(5)
    with pytest.raises(InternalServerError, match="no luck"):
        engine.prefill(prompts.prefix, [prompts.chunk(30)], MemorySource(), block_size=16)
    runner.before = None
    request = request_of(prompts)
    check(request, engine.generate(request, MemorySource()))
    assert engine.stats().alive


def test_a_decoder_that_fails_fails_its_own_request_only(
    engine: Engine, runner: FakeRunner, prompts: RandomPrompts
) -> None:
    class Broken(Letters):
        def push(self, token_id: int) -> str:
            raise ValueError("not a token")

    gate = threading.Event()
    runner.before = lambda batch: gate.wait(10) and None
    good_request = request_of(prompts, decoder=Letters)
    bad = engine.generate(request_of(prompts, decoder=Broken), MemorySource())
    good = engine.generate(good_request, MemorySource())
    gate.set()
    with pytest.raises(InternalServerError, match="not a token"):
        bad.result(5)
    check(good_request, good)


def test_a_source_that_fails_is_the_requests_failure(engine: Engine, prompts: RandomPrompts) -> None:
    def busy(ref: ChunkRef) -> ChunkKV | None:
        raise Overloaded("the database is locked", hint="wait")

    def broken(ref: ChunkRef) -> ChunkKV | None:
        raise OSError("no such disk")

    with pytest.raises(Overloaded, match="locked"):
        engine.generate(request_of(prompts), MemorySource(busy)).result(5)
    with pytest.raises(InternalServerError, match="no such disk"):
        engine.generate(request_of(prompts), MemorySource(broken)).result(5)


def test_a_chunk_that_cannot_be_kept_is_used_all_the_same(engine: Engine, prompts: RandomPrompts) -> None:
    class ReadOnly(MemorySource):
        def write(self, ref: ChunkRef, kv: ChunkKV) -> None:
            raise OSError("the disk is full")

    request = request_of(prompts, prompts.chunk(20))
    generation = engine.generate(request, ReadOnly())
    check(request, generation)
    assert generation.result().usage.healed_chunks == 2


def test_a_slow_read_holds_up_its_own_request_only(engine: Engine, prompts: RandomPrompts) -> None:
    gate = threading.Event()
    slow = engine.generate(
        request_of(prompts, prompts.chunk(20)), MemorySource(lambda ref: gate.wait(10) and None)
    )
    other = RandomPrompts(FAKE_VOCAB, seed=1)
    request = request_of(other, other.chunk(20))
    check(request, engine.generate(request, MemorySource()))
    assert slow.finish_reason is None
    gate.set()
    slow.result(10)


def test_waiting_has_an_end(make_engine: MakeEngine, runner: FakeRunner, prompts: RandomPrompts) -> None:
    engine = make_engine(num_blocks=16)
    runner.before = lambda batch: time.sleep(0.02)
    hog = engine.generate(request_of(prompts, reuse="off", tail=190, max_tokens=40), MemorySource())
    late = engine.generate(
        request_of(prompts, reuse="off", tail=100, max_tokens=30, queue_seconds=0.1), MemorySource()
    )
    started = time.monotonic()
    with pytest.raises(Overloaded, match="no room"):
        late.result(5)
    assert 0.05 < time.monotonic() - started < 2
    with pytest.raises(APITimeoutError):
        hog.result(0.01)
    hog.cancel()
    assert hog.result(5).finish_reason == "cancelled"


def test_cancel_frees_within_a_step(engine: Engine, runner: FakeRunner, prompts: RandomPrompts) -> None:
    runner.before = lambda batch: time.sleep(0.005)
    source = MemorySource()
    with engine.generate(request_of(prompts, prompts.chunk(50), max_tokens=400), source) as generation:
        for _ in zip(range(3), generation, strict=False):
            pass
    steps = engine.stats().lanes[0].counters.steps
    result = generation.result(5)
    assert result.finish_reason == "cancelled" and 3 <= len(result.token_ids) < 100
    lane = engine.stats().lanes[0]
    assert lane.counters.steps <= steps + 2
    assert lane.blocks.pinned == lane.blocks.private == 0
    engine.check_integrity()


def test_an_ingest_whose_caller_fails_is_cancelled(engine: Engine, prompts: RandomPrompts) -> None:
    def give_up(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(
            prompts.prefix,
            [prompts.chunk(60) for _ in range(30)],
            MemorySource(),
            block_size=16,
            on_progress=give_up,
        )
    wait_until(lambda: engine.stats().lanes[0].jobs == 0)
    assert engine.stats().lanes[0].blocks.pinned == 0


# The end


def test_close_ends_everything_and_everyone_is_told(
    make_engine: MakeEngine, runner: FakeRunner, prompts: RandomPrompts
) -> None:
    engine = make_engine(num_blocks=32)
    runner.before = lambda batch: time.sleep(0.002)
    running = engine.generate(request_of(prompts, max_tokens=300), MemorySource())
    waiting = engine.generate(request_of(prompts, max_tokens=300), MemorySource())
    failures: list[MemKVError] = []

    def ingest() -> None:
        try:
            engine.prefill(prompts.prefix, [prompts.chunk(60)] * 3, MemorySource(), block_size=16)
        except MemKVError as error:
            failures.append(error)

    thread = threading.Thread(target=ingest)
    thread.start()
    next(iter(running))
    engine.close()
    for generation in (running, waiting):
        with pytest.raises(EngineClosed):
            generation.result(5)
    thread.join(5)
    assert not thread.is_alive()
    assert [type(error) for error in failures] in ([], [EngineClosed])
    with pytest.raises(EngineClosed):
        engine.generate(request_of(prompts), MemorySource())
    with pytest.raises(EngineClosed):
        engine.prefill(prompts.prefix, [prompts.chunk(10)], MemorySource(), block_size=16)
    assert not engine.stats().alive
    engine.drop(["prefix"])
    engine.close()


def test_close_lets_those_finish_that_can(engine: Engine, runner: FakeRunner, prompts: RandomPrompts) -> None:
    runner.before = lambda batch: time.sleep(0.001)
    request = request_of(prompts, max_tokens=50)
    generation = engine.generate(request, MemorySource())
    closer = threading.Thread(target=engine.close, args=(20.0,))
    closer.start()
    wait_until(lambda: not engine.stats().alive)
    with pytest.raises(EngineClosed):
        engine.generate(request_of(prompts), MemorySource())
    check(request, generation)
    assert generation.result().finish_reason == "length"
    closer.join(5)
    assert not closer.is_alive()


def test_the_threads_death_is_seen_by_everyone(
    engine: Engine, prompts: RandomPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: object, now: float) -> None:
        raise SystemError("the books do not balance")

    engine.generate(request_of(prompts), MemorySource()).result(5)
    monkeypatch.setattr("memkv.engine.lane.Lane.settle", die)
    generation = engine.generate(request_of(prompts), MemorySource())
    with pytest.raises(EngineClosed, match="books do not balance"):
        generation.result(5)
    wait_until(lambda: not engine.stats().alive)
    with pytest.raises(EngineClosed, match="died"):
        engine.generate(request_of(prompts), MemorySource())


def test_calls_from_many_threads(engine: Engine, prompts: RandomPrompts) -> None:
    requests = [request_of(prompts, prompts.chunk(20), max_tokens=5) for _ in range(24)]
    errors: list[BaseException] = []

    def call(own: list[GenerateRequest]) -> None:
        try:
            for request in own:
                generation = engine.generate(request, MemorySource())
                check(request, generation)
                engine.stats()
                engine.check_integrity()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=call, args=(requests[index::6],)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []


def test_work_of_others_is_done_in_the_engines_thread(make_engine: MakeEngine, runner: FakeRunner) -> None:
    engine = make_engine()
    assert engine.run(lambda: threading.current_thread().name) == "memkv-engine"
    with pytest.raises(ZeroDivisionError):
        engine.run(lambda: 1 // 0)
    assert engine.run(lambda: 3) == 3
    engine.close()
    with pytest.raises(EngineClosed):
        engine.run(lambda: 4)


def test_work_that_is_posted_on_and_on_holds_up_no_step(engine: Engine, prompts: RandomPrompts) -> None:
    """As chunks that keep coming in from a disk do."""
    over = threading.Event()

    def again() -> None:
        if not over.is_set():
            engine._thread.post(again)

    again()
    try:
        request = request_of(prompts)
        generation = engine.generate(request, MemorySource())
        generation.result(30)
        check(request, generation)
    finally:
        over.set()


def test_work_that_a_closing_engine_leaves_undone_ends_with_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine()
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go_on.wait(20)

    outcomes: list[object] = []

    def ask(work: Callable[[], object]) -> None:
        try:
            outcomes.append(engine.run(work))
        except EngineClosed as error:
            outcomes.append(error)

    threads = [threading.Thread(target=ask, args=(work,)) for work in (hold, lambda: 5)]
    threads[0].start()
    entered.wait(20)
    threads[1].start()
    closing = threading.Thread(target=engine.close)
    closing.start()
    go_on.set()
    for thread in (*threads, closing):
        thread.join(20)
        assert not thread.is_alive()
    assert len(outcomes) == 2
    assert all(outcome in (None, 5) or isinstance(outcome, EngineClosed) for outcome in outcomes)


@pytest.mark.parametrize("looks", [1, 2, 3, 4, 5])
def test_a_chunk_that_reaches_the_host_between_two_steps_lets_those_run_who_wait(
    engine: Engine, prompts: RandomPrompts, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the copy ends: looked for that many times."""
    seen = itertools.count(1)
    monkeypatch.setattr(Export, "is_over", property(lambda export: next(seen) >= looks))
    request = request_of(prompts, prompts.chunk(40), max_tokens=3)
    assert len(engine.generate(request, MemorySource()).result(10).token_ids) == 3


def test_an_answer_that_is_kept_keeps_no_engine(prompts: RandomPrompts, runner: FakeRunner) -> None:
    engine = Engine(fake_model(), "float32", config())
    generation = engine.generate(request_of(prompts), MemorySource())
    assert generation.result(10).token_ids
    generation.cancel()  # does nothing any more
    engine.close()
    pool = weakref.ref(next(iter(engine._thread.lanes.values())).kv_cache)
    del engine
    gc.collect()
    assert pool() is None


def test_a_job_that_was_not_admitted_ends_with_its_engine(
    prompts: RandomPrompts, runner: FakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    entered, leave = threading.Event(), threading.Event()
    runner.before = lambda batch: (entered.set(), leave.wait(5))[0]
    engine = Engine(fake_model(), "float32", config())
    engine.generate(request_of(prompts), MemorySource())
    entered.wait(5)
    job = engine.submit_prefill(prompts.prefix, [prompts.chunk(20)], MemorySource(), block_size=16)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: engine._thread._agenda.is_closed)
    leave.set()
    closing.join(5)
    with pytest.raises(EngineClosed):
        engine.collect(job)
    assert "could not be given back" not in caplog.text


def test_a_prefetch_that_is_under_way_holds_nothing_of_an_engine_that_is_closed(
    prompts: RandomPrompts, runner: FakeRunner
) -> None:
    reading, leave = threading.Event(), threading.Event()
    source = MemorySource(lambda ref: (reading.set(), leave.wait(5), None)[2])
    engine = Engine(fake_model(), "float32", config())
    engine.prefetch([prompts.chunk(40)], source, block_size=16)
    assert reading.wait(5)
    threading.Timer(0.2, leave.set).start()
    engine.close()
    (lane,) = engine.stats().lanes
    assert lane.blocks.free == lane.blocks.total
    engine.check_integrity()
