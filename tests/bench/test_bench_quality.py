"""The kept results of evaluations say what the code of today would say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import quality_study

from memkv.config import QueryConfig
from memkv.eval.study import Row, Study, read_study
from memkv.eval.subjects import parse_subject
from memkv.memory.gate import cheapest_that_passed

RESULTS = Path(__file__).parent / "results" / "quality"
STUDIES = sorted(RESULTS.glob("*.json"))


def rows_of(name: str, kind: str = "tasks") -> dict[str, Row]:
    return {row.policy: row for row in read_study(RESULTS / f"{name}.json").rows if row.kind == kind}


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_result_is_whole(path: Path) -> None:
    study = read_study(path)
    for row in study.rows:
        parse_subject(row.policy)
        assert row.questions == (194 if row.kind == "tasks" else 126)
    check_measures(study)


def check_measures(study: Study) -> None:
    assert study.rows
    for row in study.rows:
        assert row.low <= row.value == row.kl <= row.high
        assert row.dnll_low <= row.dnll <= row.dnll_high
        assert 0.0 <= row.fresh <= 1.0
        if row.policy in ("full", "exact"):
            assert abs(row.dnll) < 0.005


def test_every_option_was_measured_on_the_same_questions() -> None:
    options = msgspec.json.decode((RESULTS / "options" / "smollm2.json").read_bytes(), type=dict[str, Study])
    assert len(options) == 16
    for study in options.values():
        check_measures(study)
        assert {row.questions for row in study.rows} == {64}


def test_generated_tasks_are_five_hundred_of_four_kinds() -> None:
    for name in ("smollm2-generated", "smollm2-generated-prompt"):
        full = [row for row in read_study(RESULTS / f"{name}.json").rows if row.policy == "full"]
        assert len(full) == 4
        assert sum(row.questions for row in full) >= 500


def test_blocks_by_attention_lose_less_than_peers_of_the_same_cost() -> None:
    rows = rows_of("smollm2-mtrag")
    for ours, peer in (
        ("select:0.15", "cacheblend:0.15"),
        ("select:0.3", "cacheblend:0.3"),
        ("select:0.1", "head:1"),
        ("select:0.2", "head:2"),
    ):
        assert rows[ours].dnll_high < rows[peer].dnll_low
        assert rows[ours].fresh <= rows[peer].fresh + 0.02
    assert rows["alone"].dnll_low > rows["map"].dnll_high


def test_what_the_gate_makes_of_them() -> None:
    config = QueryConfig()
    for names, policy, speedup in (
        (("smollm2-mtrag", "smollm2-generated"), "select:0.3", 2.0),
        (("smollm2-mtrag-prompt", "smollm2-generated-prompt"), "select:0.2", 4.0),
    ):
        studies = [read_study(RESULTS / f"{name}.json") for name in names]
        assert len({study.fingerprint_digest for study in studies}) == 1
        gates = [row for study in studies for row in study.gate_rows()]
        assert cheapest_that_passed(gates, config, chunk_tokens=256).policy.name == policy
        found = rows_of(names[0])[policy].ttft_speedup
        assert found is not None and found >= speedup


def test_the_study_that_made_them_names_what_they_hold() -> None:
    kept: dict[str, set[str]] = {}
    for job in quality_study.jobs().values():
        names = {each if isinstance(each, str) else each.name for each in job.policies}
        kept.setdefault(job.result, {"full"}).update(names)
    assert kept.pop("smollm2-options")
    assert set(kept) == {path.stem for path in STUDIES}
    for name, policies in kept.items():
        assert {row.policy for row in read_study(RESULTS / f"{name}.json").rows} == policies
