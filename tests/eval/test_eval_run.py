"""Evaluations of a tiny random model: what is exact costs nothing, and every number has its meaning."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from memkv.cli.root import main
from memkv.config import Config, load_config
from memkv.errors import BadRequestError
from memkv.eval.frontier import draw
from memkv.eval.generator import generate_tasks
from memkv.eval.prompts import Form, Primer
from memkv.eval.run import Plan, run_evaluation
from memkv.eval.study import Row, Study, read_study
from memkv.eval.subjects import parse_subject
from memkv.eval.tasks import Task
from memkv.store import Store

POLICIES = ("exact", "map", "head:1", "select:0.3", "mass:0.5", "cacheblend:1.0", "cacheblend:0.2", "alone")


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, minilm: Path, tiny_model_dir: Callable[[str], Path]
) -> Config:
    return load_config(
        {
            "store.data_dir": str(tmp_path_factory.mktemp("store")),
            "model.model": str(tiny_model_dir("llama")),
            "model.embedder": str(minilm),
            "engine.pool_bytes": "64M",
            "engine.threads": 1,
            "kv.dtype": "float32",
        },
        env={},
    )


def plan(*names: str, **changes: object) -> Plan:
    form = Form(length=700, chunk_tokens=128, gold_tokens=8)
    made = Plan(tuple(map(parse_subject, names)), form, timed=1, group=2)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def study(config: Config) -> Study:
    tasks = generate_tasks(4, kinds=("needle_among", "multi_hop"))
    return run_evaluation(config, tasks, "made up", plan(*POLICIES, answer_tokens=3))


def rows(study: Study, policy: str) -> list[Row]:
    return [row for row in study.rows if row.policy == policy]


def test_every_policy_has_a_row_for_every_kind(study: Study) -> None:
    assert {row.kind for row in study.rows} == {"needle_among", "multi_hop"}
    for policy in ("full", *POLICIES):
        assert [row.questions for row in rows(study, policy)] == [2, 2]


@pytest.mark.parametrize("policy", ["full", "exact", "cacheblend:1.0"])
def test_what_computes_everything_costs_nothing(study: Study, policy: str) -> None:
    for row in rows(study, policy):
        assert row.kl == pytest.approx(0.0, abs=1e-5)
        assert row.dnll == pytest.approx(0.0, abs=1e-4)
        assert row.agreement == 1.0


def test_what_computes_less_costs_something(study: Study) -> None:
    for policy in ("map", "head:1", "select:0.3", "alone"):
        assert all(row.kl > 1e-5 for row in rows(study, policy)), policy


def test_fresh_shares_are_those_of_the_policies(study: Study) -> None:
    for row in rows(study, "map"):
        assert row.fresh == 0.0
    for row in rows(study, "select:0.3"):
        assert 0.2 < row.fresh < 0.35
    for row in rows(study, "full"):
        assert row.fresh == 1.0
        assert row.mapped_bytes == 0.0
    assert all(row.fresh < 1.0 for row in rows(study, "exact"))


def test_times_are_of_memkvs_own_policies(study: Study) -> None:
    assert all(row.ttft_ms and row.ttft_speedup for row in rows(study, "map"))
    assert all(row.ttft_speedup == 1.0 for row in rows(study, "full"))
    assert all(row.ttft_ms is None for row in rows(study, "cacheblend:0.2"))
    assert all(row.f1 is not None and row.rouge_l is not None for row in rows(study, "map"))
    assert all(row.rouge_l == row.rouge_l_full is not None for row in rows(study, "full"))


def test_a_study_is_read_as_it_was_written(study: Study, tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    path.write_bytes(msgspec.json.encode(study))
    assert read_study(path) == study
    whole = path.read_text()
    twice = whole.replace('"policy":"map"', '"policy":"exact"')
    absurd = [whole.replace('"questions":2', f'"questions":{number}') for number in (-1, 2**63, 2**31)]
    odd = whole.replace('"kind":"multi_hop"', '"kind":"multi\\u0000hop"')
    empty = msgspec.json.encode(msgspec.structs.replace(study, rows=[])).decode()
    edited = [edit(study, **{name: -0.5}) for name in ("high", "dnll_high")] + [edit(study, dnll_low=9.0)]
    for text in ("{}", "", "[1]", '{"model": 3}', twice, *absurd, odd, empty, *edited):
        assert text != whole
        path.write_text(text)
        with pytest.raises(BadRequestError, match="no result of an evaluation"):
            read_study(path)


def edit(study: Study, **changes: float) -> str:
    """With one row changed."""
    first, *others = study.rows
    changed = msgspec.structs.replace(study, rows=[msgspec.structs.replace(first, **changes), *others])
    return msgspec.json.encode(changed).decode()


def test_the_gate_goes_by_policies_that_were_measured(study: Study) -> None:
    gates = study.gate_rows()
    assert {row.policy for row in gates} == set(POLICIES)
    assert all(row.questions == 2 for row in gates)
    assert {row.chunk_tokens for row in gates} == {study.form["chunk_tokens"]}
    for other in ({"primer": "stored"}, {"order": "shuffled"}):
        with pytest.raises(BadRequestError, match="as a server makes them"):
            msgspec.structs.replace(study, form={**study.form, **other}).gate_rows()
    for size in (None, "256", 15, 4097, 10**30):
        with pytest.raises(BadRequestError, match="no collection has chunks"):
            msgspec.structs.replace(study, form={**study.form, "chunk_tokens": size}).gate_rows()
    long = msgspec.structs.replace(study, form={**study.form, "length": 4096}, chunk_tokens_mean=3968.0)
    assert {row.length for row in long.gate_rows()} == {3968}
    long = msgspec.structs.replace(long, chunk_tokens_mean=3968.5)  # no room for another chunk of 128
    assert {row.length for row in long.gate_rows()} == {4096}
    with pytest.raises(BadRequestError, match="no policy was measured"):
        msgspec.structs.replace(study, rows=rows(study, "full")).gate_rows()


def test_a_task_that_exceeds_the_context_is_left_out_and_said(config: Config) -> None:
    told: list[str] = []
    small = generate_tasks(1, kinds=("needle",))
    text = " ".join(f"Sentence {number}." for number in range(3000))
    large = Task("giant", "needle", "What?", ("x",), (text,), "It is")
    found = run_evaluation(config, [*small, large], "x", plan("map", timed=0), told.append)
    assert rows(found, "map")[0].questions == found.left_out == 1
    assert any("giant" in words and "context" in words for words in told)
    with pytest.raises(BadRequestError, match="giant"):
        run_evaluation(config, [large], "x", plan("map", timed=0))
    with pytest.raises(BadRequestError, match="room for 96"):
        run_evaluation(config, small, "x", plan("map", timed=0, answer_tokens=4000))


def test_nothing_to_measure_is_refused(config: Config) -> None:
    tasks = generate_tasks(1)
    with pytest.raises(BadRequestError, match="no policy"):
        run_evaluation(config, tasks, "x", plan())
    with pytest.raises(BadRequestError, match="no task"):
        run_evaluation(config, tasks, "x", plan("map", kinds=("riddles",)))


@pytest.mark.parametrize("name", ["zz", "select:2", "cacheblend:0", "cacheblend:x", "temperature:-1", ""])
def test_names_that_are_no_policy_are_refused(name: str) -> None:
    with pytest.raises(BadRequestError):
        parse_subject(name)


def test_the_command_measures_keeps_and_gates(config: Config, tmp_path: Path) -> None:
    kept, data = tmp_path / "study.json", tmp_path / "data"
    common = ["--data-dir", str(data), "--model", config.model.model, "--embedder", config.model.embedder]
    runner = CliRunner()
    ran = runner.invoke(
        main,
        [
            *("eval", "run", *common, "--generate", "2", "--policy", "map", "--length", "400"),
            *("--timed", "0", "--output", str(kept), "--gate", "--format", "json"),
        ],
    )
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["left_out"] == 0
    assert "note: 1 questions of needle; no policy passes the gate on fewer than 100" in ran.stderr
    assert "2 generated tasks, seed 0: no approximation" in ran.stderr
    shown = runner.invoke(main, ["eval", "compare", str(kept), str(kept)])
    assert shown.exit_code == 0
    assert shown.output.count("needle_among") >= 2
    assert "left out" not in shown.output
    kept.write_bytes(msgspec.json.encode(msgspec.structs.replace(read_study(kept), left_out=7)))
    assert "; 7 tasks left out" in runner.invoke(main, ["eval", "compare", str(kept)]).output
    gated = runner.invoke(main, ["eval", "gate", str(kept), *common, "--format", "json"])
    (told,) = json.loads(gated.stdout)
    assert told["auto"] == "exact"  # two questions prove nothing
    assert "so auto means exact" in told["fallback_reason"]
    refused = runner.invoke(main, ["eval", "run", *common, "--data", str(tmp_path / "none.jsonl")])
    assert refused.exit_code == 2
    assert "no file" in refused.output
    for wrong in (
        ["--gate", "--primer", "stored"],
        ["--gate", "--order", "shuffled"],
        ["--output", str(tmp_path / "none" / "x.json")],
        ["--output", "/dev/null"],
        ["--times-only", "--timed", "0"],
        ["--times-only", "--gate"],
    ):
        refused = runner.invoke(main, ["eval", "run", *common, *wrong])
        assert refused.exit_code == 2, wrong
    with Store.open(data):
        refused = runner.invoke(main, ["eval", "run", *common, "--gate"])
    assert refused.exit_code == 1
    assert "question 1" not in refused.output


def test_kept_results_take_the_place_of_what_stood_there(
    config: Config, study: Study, tmp_path: Path
) -> None:
    nothing = {"dnll": 0.0, "dnll_low": 0.0, "dnll_high": 0.0, "checkable": False}
    proven = [msgspec.structs.replace(row, questions=200, **nothing) for row in rows(study, "map")]
    unproven = [msgspec.structs.replace(row, questions=9) for row in proven]
    files = {}
    for name, found in {"good": proven, "few": unproven}.items():
        files[name] = str(tmp_path / name)
        kept = msgspec.structs.replace(study, data=name, rows=found)
        Path(files[name]).write_bytes(msgspec.json.encode(kept))

    def gate(*names: str) -> list[str]:
        paths = [files[name] for name in names]
        ran = CliRunner().invoke(
            main, ["eval", "gate", *paths, "--data-dir", str(tmp_path / "data"), "--format", "json"]
        )
        assert ran.exit_code == 0, ran.output
        return [told["auto"] for told in json.loads(ran.stdout)]

    assert gate("few") == ["exact"]
    assert gate("good") == ["map"]
    assert gate("few", "good") == ["exact", "exact"]


def test_a_result_that_no_collection_here_goes_by_is_kept_and_said(
    config: Config, study: Study, tmp_path: Path
) -> None:
    data = ["--data-dir", str(tmp_path / "data")]
    models = ["--model", config.model.model, "--embedder", config.model.embedder, "--format", "json"]
    made = CliRunner().invoke(main, ["collections", "create", "c", *data, *models])
    kept = tmp_path / "kept.json"
    for digest, said in ((json.loads(made.stdout)["fingerprint"], False), ("another", True)):
        kept.write_bytes(msgspec.json.encode(msgspec.structs.replace(study, fingerprint_digest=digest)))
        ran = CliRunner().invoke(main, ["eval", "gate", str(kept), *data])
        assert ran.exit_code == 0, ran.output
        assert ("no collection here is of the model and prefix" in ran.stderr) == said


def test_the_frontier_is_drawn(study: Study, tmp_path: Path) -> None:
    drawing = tmp_path / "frontier.svg"
    draw([study], drawing)
    assert "select:0.3" in drawing.read_text()
    with pytest.raises(BadRequestError, match="xyz"):
        draw([study], tmp_path / "frontier.xyz")
    with pytest.raises(BadRequestError, match="no such file or directory"):
        draw([study], tmp_path / "nowhere" / "frontier.svg")


def test_odd_names_and_intervals_are_drawn(study: Study, tmp_path: Path) -> None:
    row = msgspec.structs.replace(rows(study, "map")[0], kind="$\\a_$", dnll=0.1, dnll_low=0.1 + 1e-12)
    draw([msgspec.structs.replace(study, rows=[row])], tmp_path / "frontier.svg")
    assert "$\\a_$" in (tmp_path / "frontier.svg").read_text()


def test_a_policy_named_twice_is_measured_once(config: Config) -> None:
    tasks = generate_tasks(2, kinds=("needle",))
    found = run_evaluation(config, tasks, "x", plan("map", "map", "select:0.10", "select:0.1", timed=0))
    assert [(row.policy, row.questions) for row in found.rows] == [("full", 2), ("map", 2), ("select:0.1", 2)]


def test_prompts_of_one_chunk_prove_nothing(config: Config) -> None:
    tasks = [Task("one", "kind", "What?", ("x",), ("Some words.",), "It is", distractors=())]
    with pytest.raises(BadRequestError, match="one chunk"):
        run_evaluation(config, tasks, "x", plan("map", timed=0))


def test_what_was_found_so_far_is_kept(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkv.eval.run._KEEP_SECONDS", 0.0)
    kept: list[Study] = []
    tasks = generate_tasks(4, kinds=("needle",))
    found = run_evaluation(config, tasks, "x", plan("map", timed=0), keep=kept.append)
    assert [rows(study, "map")[0].questions for study in kept if rows(study, "map")] == [2, 4]
    assert kept[-1].rows == found.rows


@pytest.mark.parametrize("primer", ["stored", "prompt"])
def test_a_primer_stands_where_it_is_said(config: Config, primer: Primer) -> None:
    tasks = generate_tasks(2, kinds=("needle",))
    form = Form(length=400, chunk_tokens=128, gold_tokens=8)
    names = ("map", "exact", "cacheblend:1.0")
    plain = run_evaluation(config, tasks, "x", plan(*names, timed=0, form=form))
    primed = run_evaluation(config, tasks, "x", plan(*names, timed=0, form=replace(form, primer=primer)))
    for name in ("exact", "cacheblend:1.0"):
        assert rows(primed, name)[0].dnll == pytest.approx(0.0, abs=1e-4)
    assert rows(primed, "map")[0].dnll != rows(plain, "map")[0].dnll
    same_prompts = primer == "stored"
    assert (primed.prefix_tokens == plain.prefix_tokens) == same_prompts
    assert (rows(primed, "full")[0].nll_full == rows(plain, "full")[0].nll_full) == same_prompts
    assert (rows(primed, "exact")[0].fresh == 1.0) == same_prompts
    assert primed.fingerprint_digest != plain.fingerprint_digest
