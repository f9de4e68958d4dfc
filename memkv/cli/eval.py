"""`memkv eval`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from memkv.cli.log import log_warnings_to_stderr
from memkv.cli.output import Output, bytes_text, output_options, printable, table
from memkv.cli.progress import steps
from memkv.cli.target import Target, embedded_options
from memkv.errors import BadRequestError

if TYPE_CHECKING:
    from memkv.eval.study import Row, Study
    from memkv.eval.tasks import Task
    from memkv.memory.gate import ChosenPolicy
    from memkv.store.store import Store

_POLICIES = ("map", "head:1", "select:0.1", "select:0.2")


@click.group(name="eval")
def evaluate() -> None:
    """What reuse costs: answers with and without it, compared token by token."""


@evaluate.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Tasks as JSON lines; without, made-up ones.",
)
@click.option(
    "--generate", type=click.IntRange(1, 875), default=100, show_default=True, help="Made-up tasks."
)
@click.option("--questions", type=click.IntRange(1), help="At most so many, the first.  [default: all]")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="A policy, or a peer: cacheblend:R, alone, temperature:T; may be repeated.  "
    f"[default: {', '.join(_POLICIES)}]",
)
@click.option("--length", type=click.IntRange(16), default=4096, show_default=True, help="Retrieved tokens.")
@click.option(
    "--chunk-tokens", type=click.IntRange(16, 4096), default=256, show_default=True, help="Of one chunk."
)
@click.option("--order", type=click.Choice(["retrieved", "shuffled"]), default="retrieved", show_default=True)
@click.option(
    "--primer",
    type=click.Choice(["none", "stored", "prompt"]),
    default="none",
    show_default=True,
    help="Whether chunks stand behind the primer; stored: only while they are prefilled.",
)
@click.option("--system-prompt", default="", help="Of the collection.  [default: memkv's]")
@click.option("--timed", type=click.IntRange(0), default=3, show_default=True, help="Prompts timed, by kind.")
@click.option("--answers", type=click.IntRange(0), default=0, show_default=True, help="Tokens of an answer.")
@click.option("--group", type=click.IntRange(1), default=1, show_default=True, help="Prompts in a batch.")
@click.option("--times-only", is_flag=True, help="Measure times to the first token and no quality.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the result as JSON.",
)
@click.option("--gate", is_flag=True, help="Let `auto` go by the result, too, in the store of --data-dir.")
@embedded_options
@output_options
def run(target: Target, out: Output, **options: Any) -> None:
    """Measure policies against a full prefill of the same prompts.

    Each task's contexts stand among distractors, as retrieved chunks do. Reported are the KL divergence and
    the added negative log-likelihood of the gold answer, with 95 % intervals, and times to the first token.
    """
    log_warnings_to_stderr()
    if options["gate"] and (options["primer"] == "stored" or options["order"] != "retrieved"):
        raise BadRequestError(
            "--gate goes by prompts that a server makes", hint="leave --order and --primer stored out"
        )
    if options["times_only"] and (options["gate"] or not options["timed"]):
        raise BadRequestError(
            "--times-only measures no quality: nothing for --gate, and nothing at all with --timed 0",
            hint="leave one of them out",
        )
    output: Path | None = options["output"]
    if output and not output.resolve().parent.is_dir():
        raise BadRequestError(f"{output} is in no directory that exists", hint="make it first")
    if output and output.exists() and not output.is_file():
        raise BadRequestError(f"{output} is no file", hint="name another")
    if options["gate"]:
        with _store(target):  # refused now rather than when all is measured
            pass
    with steps(out) as tell:
        tell("loading the models")
        from memkv.eval.generator import generate_tasks
        from memkv.eval.prompts import Form
        from memkv.eval.run import Plan, run_evaluation
        from memkv.eval.subjects import parse_subject
        from memkv.eval.tasks import describe, read_tasks

        data, seed = options["data"], options["seed"]
        tasks = read_tasks(data) if data else generate_tasks(options["generate"], seed)
        if options["gate"]:
            _note_few(out, tasks[: options["questions"]], target.config().query.gate_questions)
        plan = Plan(
            subjects=tuple(parse_subject(name) for name in options["policies"] or _POLICIES),
            form=Form(
                length=options["length"],
                chunk_tokens=options["chunk_tokens"],
                order=options["order"],
                primer=options["primer"],
                system_prompt=options["system_prompt"],
                seed=seed,
            ),
            timed=options["timed"],
            answer_tokens=options["answers"],
            group=options["group"],
            scored=not options["times_only"],
            questions=options["questions"] or 0,
        )
        what = describe(data) if data else f"{len(tasks)} generated tasks, seed {seed}"

        def keep(study: Study) -> None:
            if output:
                _write(output, study)

        study = run_evaluation(target.config(), tasks, what, plan, tell, keep)
    if out.is_json:
        out.json(study)
    else:
        click.echo(_text(study))
    if output:
        _write(output, study)
    if options["gate"]:
        with _store(target) as store:
            store.catalog.put_gates(study.fingerprint_digest, study.gate_rows())
            out.note(_told(study, _auto(target, store, study)))


@evaluate.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: .png, .svg or .pdf.")
@output_options
def compare(files: tuple[Path, ...], plot: Path | None, out: Output) -> None:
    """Show kept results side by side, cheapest policy first."""
    from memkv.eval.study import read_study

    studies = [read_study(path) for path in files]
    if plot:
        from memkv.eval.frontier import draw

        draw(studies, plot)
    if out.is_json:
        out.json(studies)
    else:
        click.echo("\n\n".join(_text(study) for study in studies))


@evaluate.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@embedded_options
@output_options
def gate(results: tuple[Path, ...], target: Target, out: Output) -> None:
    """Let `auto` go by kept results, and by nothing else that was measured of the same model and prefix."""
    from memkv.eval.study import read_study

    studies = [read_study(path) for path in results]
    rows = [study.gate_rows() for study in studies]
    with _store(target) as store:
        for digest in {study.fingerprint_digest for study in studies}:
            store.catalog.drop_gates(digest)
        for study, kept in zip(studies, rows, strict=True):
            store.catalog.put_gates(study.fingerprint_digest, kept)
        chosen = [_auto(target, store, study) for study in studies]
        here = {row.fingerprint_digest for row in store.catalog.all_collections()}
    for path, study in zip(results, studies, strict=True):
        if here and study.fingerprint_digest not in here:
            out.note(f"note: no collection here is of the model and prefix of {path}")
    if out.is_json:
        out.json(
            [
                {
                    "fingerprint": study.fingerprint_digest,
                    "rows": len(kept),
                    "auto": auto.policy.name,
                    "fallback_reason": auto.fallback_reason,
                }
                for study, kept, auto in zip(studies, rows, chosen, strict=True)
            ]
        )
    else:
        click.echo("\n".join(map(_told, studies, chosen)))


def _note_few(out: Output, tasks: Sequence[Task], wanted: int) -> None:
    """Said before hours are spent on it."""
    for kind, count in Counter(task.kind for task in tasks).items():
        if count < wanted:
            few = f"{count} questions of {printable(kind)}"
            out.note(f"note: {few}; no policy passes the gate on fewer than {wanted}")


def _auto(target: Target, store: Store, study: Study) -> ChosenPolicy:
    """What `auto` means for prompts as they were measured."""
    from memkv.memory.gate import cheapest_that_passed

    row = study.gate_rows()[0]
    return cheapest_that_passed(
        store.catalog.gates(study.fingerprint_digest),
        target.config().query,
        chunk_tokens=row.chunk_tokens,
        mapped_tokens=row.length,
    )


def _told(study: Study, auto: ChosenPolicy) -> str:
    meaning = auto.fallback_reason or f"auto means {auto.policy.name}"
    return printable(f"{study.model}, {study.data}: {meaning}")


def _store(target: Target) -> Store:
    """Raises `MemKVError` where a server, or another command, has it open."""
    from memkv.store.store import Store

    config = target.config().store
    return Store.open(Path(config.data_dir), config.database_url or None, busy_seconds=config.busy_seconds)


def _write(path: Path, study: Study) -> None:
    import msgspec

    written = path.with_name(f".{path.name}.part")
    written.write_bytes(msgspec.json.format(msgspec.json.encode(study), indent=2) + b"\n")
    written.replace(path)


def _text(study: Study) -> str:
    rows = sorted(study.rows, key=lambda row: (row.kind, row.fresh))
    cells = [_cells(row) for row in rows]
    head = [name for name in cells[0] if any(each[name] for each in cells)]
    return "\n".join(
        (
            table(head, [[each[name] for name in head] for each in cells]),
            printable(
                f"{study.model}, {study.dtype}, KV {study.kv_dtype}, on {study.device}; {study.data}; "
                f"about {study.chunk_tokens_mean:.0f} retrieved tokens, {study.prefix_tokens} of prefix"
                f"{f'; {study.left_out} tasks left out' if study.left_out else ''}"
            ),
        )
    )


def _cells(row: Row) -> dict[str, str]:
    """By column; empty where it was not measured."""
    measured = row.questions > 0
    return {
        "tasks": row.kind,
        "policy": row.policy,
        "n": str(row.questions),
        "fresh": f"{100 * row.fresh:.1f} %" if measured else "",
        "KL": f"{row.kl:.3f}" if measured else "",
        "added NLL": f"{row.dnll:+.3f}" if measured else "",
        "95 %": f"{row.dnll_low:+.3f} to {row.dnll_high:+.3f}" if measured else "",
        "right": f"{row.accuracy:.0%} of {row.accuracy_full:.0%}" if measured and row.checkable else "",
        "F1": "" if row.f1 is None else f"{row.f1:.3f}",
        "ROUGE-L": "" if row.rouge_l is None else f"{row.rouge_l:.3f}",
        "KV mapped": bytes_text(row.mapped_bytes) if measured else "",
        "KV written": bytes_text(row.private_bytes) if measured else "",
        "first token": "" if row.ttft_ms is None else f"{row.ttft_ms:.0f} ms",
        "sooner": "" if row.ttft_speedup is None else f"{row.ttft_speedup:.1f} x",
    }
