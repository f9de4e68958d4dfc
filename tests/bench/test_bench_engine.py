"""`memkv bench engine` at a small shape: what it reports is consistent, and is what was asked for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from memkv.bench import continuous_batching
from memkv.bench.engine import CPU_SIZES, EngineBench, run_engine_bench
from memkv.bench.engine_peers import Transformers
from memkv.bench.random_model import random_model
from memkv.cli import main
from memkv.model.attention import ATTENTION_NAME

SIZES = msgspec.structs.replace(
    CPU_SIZES,
    contexts=(96, 200),
    far_contexts=(200,),
    long_context=200,
    chunk=48,
    prefix=20,
    question=12,
    rounds=1,
    batches=(1, 3),
    batch_context=96,
    batch_tokens=6,
    ingest_chunks=4,
    ingest_batch=2,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> EngineBench:
    directory: Path = tmp_path_factory.mktemp("bench")
    found = run_engine_bench(random_model("tiny", "float32", "cpu"), "bfloat16", SIZES, str(directory))
    assert list(directory.iterdir()) == []
    return found


def test_every_way_of_every_context_is_there(found: EngineBench) -> None:
    ways = [("off", "device"), *((policy, "device") for policy in SIZES.policies)]
    far = [(policy, tier) for tier in ("host", "disk") for policy in SIZES.far_policies]
    assert [(row.context, row.policy, row.tier) for row in found.ttft] == [
        (context, *way) for context in SIZES.contexts for way in (*ways, *(far if context == 200 else ()))
    ]


def test_each_way_computes_what_its_name_says(found: EngineBench) -> None:
    for row in found.ttft:
        blocks = 3 * (row.context // 48 - 1) + -(-(row.context % 48) // 16)  # of later chunks
        if row.policy == "off":
            assert row.computed_tokens == 20 + row.context + 12
            assert row.ms == row.full_prefill_ms
        elif row.policy == "map":
            assert row.computed_tokens == 12
        elif row.policy == "select:0.1":
            assert row.computed_tokens <= 12 + 16 * -(-blocks // 10)
        stages = row.queue_ms + row.load_ms + row.look_ms + row.prefill_ms
        assert stages == pytest.approx(row.ms, rel=1e-6)  # one round: no medians of different ones
        assert row.ms > row.load_ms >= 0.0 and row.transformers_ms > 0.0
        assert (row.load_ms > 0.5) == (row.tier == "disk")


def test_what_is_loaded_first_is_on_a_timeline(found: EngineBench) -> None:
    far = [row for row in found.ttft if row.tier != "device" and row.policy == "select:0.1"]
    assert [(each.context, each.policy, each.tier) for each in found.timeline] == [
        (row.context, row.policy, row.tier) for row in far
    ]
    for timeline in found.timeline:
        loads = ["read", "verified", "to the host pool"] if timeline.tier == "disk" else []
        names = list(dict.fromkeys(span.what for span in timeline.events))
        assert names == ["queued", *loads, "to the device", "looking pass", "fresh pass"]
        starts = {name: min(each.start_ms for each in timeline.events if each.what == name) for name in names}
        assert list(starts.values()) == sorted(starts.values()), "each thing needs the one before it"
        assert all(0.0 <= each.start_ms <= each.end_ms <= timeline.ms + 1.0 for each in timeline.events)
    assert 0.0 < found.disk_verify_share < 1.0


def test_decode_stands_beside_its_floor_and_its_peers(found: EngineBench) -> None:
    assert [row.batch for row in found.decode] == [1, 3]
    for row in found.decode:
        assert row.ms > row.floor_ms > 0.0
        assert row.peers_ms.keys() == {"transformers", "continuous_batching"} and row.peers_failed == {}
        assert all(ms > row.floor_ms for ms in row.peers_ms.values())
    assert found.decode[1].floor_ms > found.decode[0].floor_ms


def test_a_peer_that_fails_is_a_finding_and_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("tiny", "float32", "cpu")
    monkeypatch.setattr(continuous_batching, "_MOST_SECONDS", 0.0)
    found, failed = Transformers(model).decode_ms(2, 40, 3)
    assert found.keys() == {"transformers"}
    assert failed == {"continuous_batching": "TimeoutError: no answer within 0 seconds"}
    assert model.module.config._attn_implementation == ATTENTION_NAME


def test_a_step_of_continuous_batching_is_one_of_all_answers() -> None:
    alone = [0.0, 1.0, 2.0, 3.0, 3.5, 4.0, 4.5, 9.0]
    late = [2.9, 3.4, 3.9, 4.4, 8.9]
    ended = [2.5, 2.9, 3.4, 3.9, 4.4]
    assert continuous_batching._median_step([alone, late, ended]) == pytest.approx(0.5)


def test_every_rate_was_measured(found: EngineBench) -> None:
    rates = (
        found.read_gbs,
        found.host_load_gbs,
        found.host_link_gbs,
        found.disk_load_gbs,
        found.disk_read_gbs,
        found.ingest_tokens_per_s,
        found.forward_tokens_per_s,
    )
    assert all(rate > 0.0 for rate in rates), rates


@pytest.mark.parametrize("form", ["json", "table"])
def test_the_command_prints_it(found: EngineBench, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr("memkv.bench.engine.run_engine_bench", lambda *args: found)
    result = CliRunner().invoke(main, ["bench", "engine", "--shape", "tiny", "--format", form])
    assert result.exit_code == 0, result.output
    if form == "json":
        assert msgspec.json.decode(result.stdout.encode(), type=EngineBench) == found
    else:
        assert "over 200 tokens from disk" in result.output and "transformers ms" in result.output
