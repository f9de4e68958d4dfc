"""`memkv bench load` on a made-up trace and a tiny model: what it reports is what happened, and it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from memkv.bench.engine_store import BenchStore
from memkv.bench.load import LoadBench, LoadRow, LoadSizes, Objectives, replay, run_load_bench
from memkv.bench.random_model import random_model
from memkv.bench.trace import TracePrompts, TraceRequest, read_trace
from memkv.cli import main
from memkv.config import EngineConfig
from memkv.engine.engine import Engine
from memkv.engine.reuse import Map
from memkv.errors import BadRequestError
from memkv.model.loader import LoadedModel

TRACE = (
    TraceRequest(0, 1030, 6, (0, 1, 2)),
    TraceRequest(50, 1536, 4, (0, 1, 3)),
    TraceRequest(100, 40, 5, (4,)),
    TraceRequest(150, 1100, 3, (0, 5, 6)),
    TraceRequest(400, 513, 1, (0, 7)),
    TraceRequest(450, 512 * 17, 1, tuple(range(10, 27))),  # longer than the model's context
)
GENEROUS = Objectives(ttft_ms=60_000.0, itl_ms=60_000.0)
CONFIG = EngineConfig(pool_bytes=40_000_000, threads=1)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model("tiny", "float32", "cpu")


@pytest.fixture(scope="module")
def found(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadBench:
    directory: Path = tmp_path_factory.mktemp("load")
    sizes = LoadSizes(rates=(2.0,), policies=("exact", "map"), objectives=GENEROUS, bodies=3)
    told: list[str] = []
    found = run_load_bench(model, "bfloat16", CONFIG, TRACE, sizes, str(directory), told.append)
    assert list(directory.iterdir()) == []
    for row in found.load:  # as soon as it is known
        name = row.policy if row.reuse == "on" else "off"
        assert any(words.startswith(f"rate 2: {name}: {row.good_share:.0%} of") for words in told)
    return found


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[Engine]:
    with Engine(model, "bfloat16", CONFIG) as engine:
        yield engine
        engine.check_integrity()


def test_every_way_was_replayed_whole(found: LoadBench) -> None:
    assert [(row.rate, row.reuse, row.policy) for row in found.load] == [
        (2.0, "off", "off"),
        (2.0, "on", "exact"),
        (2.0, "on", "map"),
    ]
    assert found.left_out == 1
    for row in found.load:
        assert (row.requests, row.finished, row.refused, row.bodies) == (5, 5, 0, 3)
        assert row.good_share == 1.0
        assert row.goodput == pytest.approx(5 / row.seconds)
        assert row.tokens_per_s == pytest.approx(19 / row.seconds)
        assert row.seconds >= 0.2, "the last one came after 400 ms, at twice the rate"
        assert 0.0 < row.ttft_p50_ms <= row.ttft_p99_ms and 0.0 <= row.itl_p50_ms <= row.itl_p99_ms


def test_more_is_mapped_the_more_a_policy_reuses(found: LoadBench) -> None:
    off, exact, mapped = (row.cached_share for row in found.load)
    assert off == 0.0
    prompts = sum(64 + request.input_length for request in TRACE[:5])
    chunks = sum(512 * (len(request.hash_ids) - 1) for request in TRACE[:5])
    assert mapped == pytest.approx((chunks + 5 * 64) / prompts)
    assert 0.0 < exact < mapped


def test_what_takes_too_long_is_cut_off_and_not_good(engine: Engine, tmp_path: Path) -> None:
    with BenchStore(tmp_path) as store:
        prompts = TracePrompts(store, 512, 2)
        prompts.prepare(engine)
        endless = TraceRequest(0, 600, 7000, (0, 1))
        started = time.monotonic()
        row = replay(
            engine, prompts, [TRACE[2], endless], "map", rate=1.0, objectives=GENEROUS, grace_seconds=1.0
        )
        assert time.monotonic() - started < 30.0
    assert (row.requests, row.finished) == (2, 1)
    assert row.good_share == 0.5
    assert engine.num_tasks == 0


def test_what_misses_an_objective_is_not_good(engine: Engine, tmp_path: Path) -> None:
    def goodput(ttft: float, itl: float) -> LoadRow:
        objectives = Objectives(ttft_ms=ttft, itl_ms=itl)
        return replay(engine, prompts, TRACE[:2], "map", rate=1.0, objectives=objectives, grace_seconds=20.0)

    with BenchStore(tmp_path) as store:
        prompts = TracePrompts(store, 512, 2)
        prompts.prepare(engine)
        for ttft, itl in ((1e-6, 1e6), (1e6, 1e-6)):
            row = goodput(ttft, itl)
            assert (row.finished, row.goodput, row.good_share) == (2, 0.0, 0.0)
        assert goodput(1e6, 1e6).good_share == 1.0


def test_a_request_that_can_never_fit_counts_as_refused(model: LoadedModel, tmp_path: Path) -> None:
    small = EngineConfig(pool_bytes=1_000_000, threads=1)
    with BenchStore(tmp_path) as store, Engine(model, "bfloat16", small) as engine:
        prompts = TracePrompts(store, 512, 1)
        prompts.prepare(engine)
        large = TraceRequest(0, 3000, 4000, (0, 1, 2, 3, 4, 5))
        row = replay(
            engine, prompts, [large, TRACE[2]], "map", rate=1.0, objectives=GENEROUS, grace_seconds=20.0
        )
    assert (row.refused, row.finished) == (1, 1)


def test_ids_that_stand_for_one_body_are_chunks_of_their_own(engine: Engine, tmp_path: Path) -> None:
    with BenchStore(tmp_path) as store:
        prompts = TracePrompts(store, 512, 2)
        prompts.prepare(engine)
        request = prompts.request(TraceRequest(0, 1030, 4, (0, 2, 9)), "map")
        assert request.chunks[0].token_ids == request.chunks[1].token_ids
        assert request.chunks[0].input_key != request.chunks[1].input_key
        assert request.policy == Map() and request.prompt_tokens == 64 + 1030
        result = engine.generate(request, prompts).result(60)
        assert result.usage.healed_chunks == 0, "their KV is on disk"
        off = engine.generate(prompts.request(TraceRequest(0, 1030, 4, (0, 2, 9)), "off"), prompts).result(60)
        assert off.usage.cached_tokens == 0 and off.usage.prompt_tokens == result.usage.prompt_tokens
        prompts.forget(engine, [TraceRequest(0, 1030, 4, (0, 2, 9))])
        engine.check_integrity()  # behind that
        assert engine.tokens_here((request.prefix, *request.chunks), 16) == 0


def test_a_policy_that_is_none_is_refused_before_anything_is_computed(model: LoadedModel) -> None:
    with pytest.raises(BadRequestError, match="nonsense"):
        run_load_bench(model, "bfloat16", CONFIG, TRACE, LoadSizes(policies=("nonsense",)), "/nowhere")


def test_a_trace_is_read_up_to_its_seconds_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, reversed(TRACE))) + b"\n\n")
    assert read_trace(path, 0.4) == list(TRACE[:4])


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON",
        b'{"timestamp": 0}',
        b'{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
        b'{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}',
        b'{"timestamp": 0, "input_length": 5, "output_length": 0, "hash_ids": [1]}',
        b'{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line)
    with pytest.raises(BadRequestError, match=r"trace\.jsonl"):
        read_trace(path, 1.0)


@pytest.mark.parametrize("form", ["json", "table"])
def test_the_command_prints_it(
    found: LoadBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, TRACE)))
    asked: list[LoadSizes] = []

    def run(
        model: object, dtype: object, config: object, trace: list[TraceRequest], sizes: LoadSizes, *_: object
    ):  # type: ignore[no-untyped-def]
        assert trace == list(TRACE)
        asked.append(sizes)
        return found

    monkeypatch.setattr("memkv.bench.load.run_load_bench", run)
    arguments = ["--shape", "tiny", "--rate", "2", "--policy", "map", "--ttft", "500", "--format", form]
    result = CliRunner().invoke(main, ["bench", "load", str(path), *arguments])
    assert result.exit_code == 0, result.output
    assert (asked[0].rates, asked[0].policies, asked[0].objectives.ttft_ms) == ((2.0,), ("map",), 500.0)
    if form == "json":
        assert msgspec.json.decode(result.stdout.encode(), type=LoadBench) == found
    else:
        assert "good a second" in result.output and "5 of 5" in result.output
