"""The kept results of evaluations say what the code of today would say."""

from __future__ import annotations

from pathlib import Path

import pytest

from memkv.engine.reuse import parse_policy
from memkv.eval.study import read_study
from memkv.eval.subjects import parse_subject

RESULTS = sorted((Path(__file__).parent / "results" / "quality").glob("*.json"))


def test_there_are_results() -> None:
    assert RESULTS


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_is_whole(path: Path) -> None:
    study = read_study(path)
    assert study.rows
    names = [(row.kind, row.policy) for row in study.rows]
    assert len(names) == len(set(names))
    for row in study.rows:
        parse_subject(row.policy)
        assert row.questions >= 40
        assert row.low <= row.value == row.kl <= row.high
        assert row.dnll_low <= row.dnll <= row.dnll_high
        assert 0.0 <= row.fresh <= 1.0
        if row.policy in ("full", "exact"):
            assert abs(row.dnll) < 0.005


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_blocks_by_attention_lose_less_than_peers_of_the_same_cost(path: Path) -> None:
    rows = {row.policy: row for row in read_study(path).rows}
    parse_policy("select:0.15")
    assert rows["select:0.15"].kl < rows["cacheblend:0.15"].kl
    assert rows["select:0.15"].kl < rows["head:2"].kl
    assert rows["select:0.1"].kl < rows["head:1"].kl
    assert rows["select:0.3"].kl < rows["cacheblend:0.3"].kl
    assert rows["alone"].kl > rows["map"].kl
