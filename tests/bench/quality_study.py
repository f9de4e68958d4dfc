"""The study of what reuse costs SmolLM2: every policy, peer and option, on real and made-up tasks.

    python tests/bench/quality_study.py measure DIRECTORY        once for each GPU, at the same time
    python tests/bench/quality_study.py keep DIRECTORY [TIMES]   TIMES: of `memkv eval run --times-only`

`measure` takes the jobs that no other process has taken and writes one result for each; it wants a GPU, the
model's name in MEMKV_MODEL and the MTRAG tasks under MEMKV_TEST_DATA. Products of float32 matrices are taken
in TF32, in the full prefill as in all that is compared with it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec
import torch

import memkv.eval.run
from memkv.config import load_config
from memkv.engine.reuse import Select
from memkv.eval.generator import KINDS, generate_tasks
from memkv.eval.prompts import Form
from memkv.eval.run import Plan, run_evaluation
from memkv.eval.study import Row, Study, read_study
from memkv.eval.subjects import Subject, parse_subject
from memkv.eval.tasks import describe, read_tasks
from memkv.memory.parts import load_language_model
from memkv.model.install import resolve
from memkv.text.embedder import Embedder

RESULTS = Path(__file__).with_name("results") / "quality"
GENERATED = 504
SECONDS = float(os.environ.get("MEMKV_STUDY_SECONDS", "inf"))  # no job is begun later

SELECT = ("select:0.05", "select:0.1", "select:0.15", "select:0.2", "select:0.25", "select:0.3")
FEW = ("map", "head:1", "select:0.1", "select:0.2", "select:0.3")
BETWEEN = ("select:0.05", "select:0.15", "select:0.25", "mass:0.9", "mass:0.95")
PEERS = ("cacheblend:0.15", "cacheblend:0.3")
NONE, STORED, PROMPT = Form(), Form(primer="stored"), Form(primer="prompt")


@dataclass(frozen=True)
class Job:
    """`result`: the kept result that it is a part of."""

    result: str
    form: Form
    policies: tuple[str | Subject, ...]
    kinds: tuple[str, ...] = ()
    questions: int = 0
    answers: int = 0
    generated: bool = False


def jobs() -> dict[str, Job]:
    """By name, the long ones first."""
    named: dict[str, Job] = {}
    for name, form in {"": NONE, "-stored": STORED}.items():
        result = f"smollm2-mtrag{name}"
        named[f"mtrag{name} answers"] = Job(result, form, FEW, answers=32)
        named[f"mtrag{name}"] = Job(result, form, ("exact", "head:2", *BETWEEN))
        named[f"mtrag{name} peers"] = Job(result, form, PEERS)
    named["mtrag others"] = Job(
        "smollm2-mtrag", NONE, ("order", "neighbours:1", "alone", "temperature:0.9", "temperature:0.8")
    )
    named["mtrag-prompt"] = Job("smollm2-mtrag-prompt", PROMPT, ("exact", *FEW, "select:0.05", "mass:0.9"))
    for kind in KINDS:
        for name, form in {"": NONE, "-stored": STORED, "-prompt": PROMPT}.items():
            policies = ("exact", *FEW, "select:0.15", "mass:0.9", *(PEERS if form is NONE else ()))
            named[f"generated{name} {kind}"] = Job(
                f"smollm2-generated{name}", form, policies, kinds=(kind,), generated=True
            )
    named.update(_options())
    return named


def _options() -> dict[str, Job]:
    """One thing different from the rest, on the first 64 questions of MTRAG."""
    looks = [
        Subject(option.name, option)
        for option in (
            Select(0.15),
            Select(0.15, heads=True),
            *(Select(0.15, layers=layers) for layers in ((0.0, 1 / 3), (1 / 3, 2 / 3), (0.0, 1.0))),
            *(Select(0.15, rows=rows) for rows in (1, 8)),
        )
    ]
    policies: dict[str, tuple[str | Subject, ...]] = {"looks": tuple(looks)}
    forms = {"looks": NONE, "looks stored": STORED}
    for form, name in ((STORED, " stored"), (NONE, "")):
        forms |= {f"chunks of {size}{name}": replace(form, chunk_tokens=size) for size in (64, 128, 512)}
        forms[f"shuffled{name}"] = replace(form, order="shuffled")
    for primer in ("stored", "prompt"):
        for count in (1, 2, 4):
            forms[f"{count} documents {primer}"] = Form(primer=primer, primer_documents=count)
    return {
        f"option {name}": Job("smollm2-options", form, policies.get(name.split()[0], FEW), questions=64)
        for name, form in forms.items()
    }


@cache
def _model(*_: object) -> object:
    torch.set_float32_matmul_precision("highest")  # the loader compares logits
    model = load_language_model(_config())
    torch.set_float32_matmul_precision("high")
    return model


@cache
def _embedder(*_: object) -> Embedder:
    config = _config()
    directory = Path(config.model.models_dir) if config.model.models_dir else None
    return Embedder.load(resolve(config.model.embedder, directory, allow_download=False), device="cuda")


@cache
def _config():  # type: ignore[no-untyped-def]
    changes = {"engine.pool_bytes": "15GB", "engine.max_batch_tokens": 32768, "engine.max_running": 512}
    return load_config({**changes, "model.dtype": "float32", "model.device": "cuda", "engine.threads": 2})


def measure(directory: Path) -> None:
    started = time.monotonic()
    data = Path(os.environ["MEMKV_TEST_DATA"]) / "mtrag" / "tasks.jsonl"
    memkv.eval.run.load_language_model = lambda config: _model()
    memkv.eval.run.load_embedder = lambda config: _embedder()
    directory.mkdir(parents=True, exist_ok=True)
    for name, job in jobs().items():
        try:
            (directory / f"{name}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        if time.monotonic() - started > SECONDS:
            break
        begun = time.monotonic()
        subjects = tuple(each if isinstance(each, Subject) else parse_subject(each) for each in job.policies)
        plan = Plan(subjects, job.form, 0, job.answers, group=12, kinds=job.kinds, questions=job.questions)
        tasks = generate_tasks(GENERATED, 0) if job.generated else read_tasks(data)
        what = f"{GENERATED} generated tasks, seed 0" if job.generated else describe(data)
        study = run_evaluation(_config(), tasks, what, plan)
        (directory / f"{name}.json").write_bytes(msgspec.json.encode(study))
        print(f"{time.monotonic() - started:6.1f} s  {name}: {time.monotonic() - begun:.1f} s", flush=True)


def keep(directory: Path, times: Sequence[Path]) -> None:
    """Joins the jobs of each kept result, with the times of a CPU where they are of the same prompts."""
    found: dict[str, dict[str, Study]] = {}
    for name, job in jobs().items():
        if (directory / f"{name}.json").exists():
            found.setdefault(job.result, {})[name] = read_study(directory / f"{name}.json")
    timed = {(study.data, study.form["primer"]): study for study in map(read_study, times)}
    for result, studies in found.items():
        if result == "smollm2-options":
            options = {name.removeprefix("option "): study for name, study in studies.items()}
            _write(RESULTS / "options" / "smollm2.json", options)
            continue
        whole = _joined(list(studies.values()))
        taken = timed.get((whole.data, whole.form["primer"]))
        _write(RESULTS / f"{result}.json", whole if taken is None else _timed(whole, taken))


def _joined(studies: list[Study]) -> Study:
    """One study of jobs that differ in kinds or policies alone."""
    rows = {(row.kind, row.policy): row for study in reversed(studies) for row in study.rows}
    seconds = sum(study.seconds for study in studies)
    return msgspec.structs.replace(studies[0], rows=list(rows.values()), seconds=seconds)


def _timed(study: Study, times: Study) -> Study:
    """With the times of another machine, by policy."""
    taken = {row.policy: row for row in times.rows}

    def timed(row: Row) -> Row:
        found = taken.get(row.policy)
        if found is None:
            return row
        return msgspec.structs.replace(row, ttft_ms=found.ttft_ms, ttft_speedup=found.ttft_speedup)

    versions = {f"quality {name}": version for name, version in study.versions.items()}
    versions |= {f"times {name}": version for name, version in times.versions.items()}
    return msgspec.structs.replace(
        study,
        rows=[timed(row) for row in study.rows],
        device=f"quality: {study.device}; times: {times.device}",
        versions=versions,
    )


def _write(path: Path, found: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    print(path)


def main() -> None:
    command, directory, *rest = sys.argv[1:]
    if command == "measure":
        measure(Path(directory))
    else:
        keep(Path(directory), [Path(name) for name in rest])


if __name__ == "__main__":
    main()
