"""`memkv demo`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.log import log_warnings_to_stderr
from memkv.cli.output import Output, counted, output_options, printable, table
from memkv.cli.progress import bar, steps
from memkv.cli.query import source_lines
from memkv.cli.target import Target, embedded_options
from memkv.errors import ConflictError, error_for

if TYPE_CHECKING:
    from memkv.memory import Memory
    from memkv.wire import DocumentUpload, QueryResponse, Reuse

COLLECTION = "handbook"
QUESTIONS = (
    "Which radio channel is for emergencies?",
    "Who is the principal keeper?",
    "How strong was the strongest wind?",
)
# How a question is answered: the name shown, reuse and policy.
WAYS: tuple[tuple[str, Reuse, str], ...] = (
    ("off", "off", "exact"),
    ("exact", "auto", "exact"),
    ("head:1", "auto", "head:1"),
    ("map", "auto", "map"),
)
_MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """One question, answered in one way."""

    question: str
    way: str
    answer: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int


@click.command()
@embedded_options
@output_options
def demo(target: Target, out: Output) -> None:
    """Ingest the bundled handbook and ask three questions, with and without reuse.

    Works in a temporary directory unless --data-dir names one.
    """
    measured: list[Measured] = []
    with ExitStack() as stack:
        flags = dict(target.flags)
        if flags["store.data_dir"] is None:
            flags["store.data_dir"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="memkv-demo-"))
        memory = stack.enter_context(_open(Target("", flags, target.file), out))
        _ingest(memory, out)
        _ask(memory, QUESTIONS[0], *WAYS[0][1:])  # the first pass through a model is slow: not measured
        for question in QUESTIONS:
            answers = [(way, _ask(memory, question, reuse, policy)) for way, reuse, policy in WAYS]
            rows = [_measured(question, way, response) for way, response in answers]
            measured += rows
            if not out.is_json:
                _show(question, dict(answers)["exact"], rows)
    if out.is_json:
        out.json([asdict(row) for row in measured])
    else:
        _summarise(measured, out)


def handbook() -> list[DocumentUpload]:
    """The bundled documents, by name."""
    from importlib import resources

    from memkv.wire import DocumentUpload

    files = sorted(resources.files("memkv.demo").iterdir(), key=lambda file: file.name)
    return [
        DocumentUpload(data=file.read_bytes(), filename=file.name, external_id=file.name)
        for file in files
        if file.name.endswith(".md")
    ]


def _open(target: Target, out: Output) -> Memory:
    log_warnings_to_stderr()
    with steps(out) as tell:
        tell("loading the models")
        from memkv.memory import Memory

        return Memory.open(target.config(), on_progress=tell)


def _ingest(memory: Memory, out: Output) -> None:
    from memkv.wire import CollectionCreate

    documents = handbook()
    memory.create_collection(CollectionCreate(name=COLLECTION), exist_ok=True)
    with bar(out, "ingesting") as progress:
        accepted = memory.ingest(COLLECTION, documents)
        job = accepted.job and memory.wait_job(accepted.job.id, timeout=None, on_progress=progress.job)
    if job is None:
        out.note(f"{counted(len(documents), 'document')}: all of them known and unchanged, nothing prefilled")
        return
    if job.status != "succeeded":
        if job.errors:
            problem = job.errors[0]
            raise error_for(problem.code, problem.status)(problem.detail, hint=problem.hint)
        raise ConflictError(f"the ingest job ended as {job.status}", hint="run memkv demo again")
    counts = job.counts
    out.note(
        f"{counted(len(documents), 'document')}: {counted(counts.chunks_prefilled, 'chunk')} prefilled "
        f"({counted(counts.tokens_prefilled, 'token')}), {counts.chunks_reused} reused"
    )


def _ask(memory: Memory, question: str, reuse: Reuse, policy: str) -> QueryResponse:
    from memkv.wire import Generation, QueryRequest

    return memory.query(
        QueryRequest(
            query=question,
            collection=COLLECTION,
            reuse=reuse,
            policy=policy,
            generation=Generation(max_tokens=_MAX_TOKENS),
        )
    )


def _measured(question: str, way: str, response: QueryResponse) -> Measured:
    usage = response.usage
    return Measured(
        question=question,
        way=way,
        answer=response.answer,
        ttft_ms=response.timings.ttft_ms,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        prefilled_tokens=usage.prefilled_tokens,
    )


def _show(question: str, exact: QueryResponse, rows: Sequence[Measured]) -> None:
    click.echo(f"\n{click.style(question, bold=True)}\n{printable(exact.answer)}")
    for line in source_lines(exact):
        click.echo(f"  {line}")
    cells = [(row.way, row.prefilled_tokens, round(row.ttft_ms), row.answer) for row in rows]
    click.echo(f"\n{table(('reuse', 'prefilled tokens', 'first token ms', 'answer'), cells)}")


def _summarise(measured: Sequence[Measured], out: Output) -> None:
    """What reuse saved, and whether the answers stayed the same."""
    off = [row for row in measured if row.way == "off"]
    out.note("")
    for way, _, policy in WAYS[1:]:
        rows = [row for row in measured if row.way == way]
        faster = sum(row.ttft_ms for row in off) / sum(row.ttft_ms for row in rows)
        same = sum(row.answer == base.answer for row, base in zip(rows, off, strict=True))
        note = "" if policy == "exact" else " (an approximation)"
        out.note(
            f"{way}: first token {faster:.1f} x sooner than off, "
            f"{same} of {counted(len(rows), 'answer')} the same{note}"
        )
