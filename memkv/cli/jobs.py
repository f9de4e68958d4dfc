"""`memkv jobs list|show|watch|cancel|retry`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.output import Output, bytes_text, counted, output_options
from memkv.cli.paging import PageOptions, page_options
from memkv.cli.progress import bar, progress_text
from memkv.cli.target import Target, target_options

if TYPE_CHECKING:
    from memkv.wire import Job, JobStatus

_STATES = ("queued", "running", "succeeded", "partial", "failed", "cancelled")
_EXIT = {"succeeded": 0, "partial": 3, "failed": 1, "cancelled": 1}


@click.group()
def jobs() -> None:
    """The work behind ingest, and behind what is done to the store."""


@jobs.command("list")
@click.option("--kind", default="", metavar="KIND", help="Only jobs of this kind, such as ingest or gc.")
@click.option("--status", type=click.Choice(_STATES), help="Only jobs in this state.")
@click.option("-c", "--collection", default="", metavar="NAME", help="Only jobs of this collection.")
@page_options
@target_options
@output_options
def list_command(
    kind: str, status: JobStatus | None, collection: str, page: PageOptions, target: Target, out: Output
) -> None:
    """The jobs."""
    with target.open(out, models=False) as client:
        found = client.jobs.list(
            kind=kind,
            status=status,
            collection=collection,
            limit=page.limit,
            after=page.after,
            order=page.order,
        ).page
    out.rows(
        found,
        ("id", "kind", "collection", "status", "progress", "documents", "chunks", "created"),
        [
            (
                job.id,
                job.kind,
                job.collection,
                job.status,
                progress_text(job.progress),
                job.counts.documents,
                job.counts.chunks,
                job.created_at,
            )
            for job in found.data
        ],
    )


@jobs.command()
@click.argument("job_id", metavar="JOB")
@target_options
@output_options
def show(job_id: str, target: Target, out: Output) -> None:
    """One job: how far it is, what it made, what went wrong."""
    with target.open(out, models=False) as client:
        _show(client.jobs.retrieve(job_id), out)


@jobs.command()
@click.argument("job_id", metavar="JOB")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Give up after this long.")
@target_options
@output_options
@click.pass_context
def watch(ctx: click.Context, job_id: str, timeout: float | None, target: Target, out: Output) -> None:
    """Follow a job to its end; the exit code says how it ended."""
    with target.open(out) as client, bar(out, "waiting") as progress:
        job = client.jobs.wait(job_id, timeout=timeout, on_progress=progress.job)
    _show(job, out)
    ctx.exit(_EXIT.get(job.status, 1))


@jobs.command()
@click.argument("job_id", metavar="JOB")
@target_options
@output_options
@click.pass_context
def cancel(ctx: click.Context, job_id: str, target: Target, out: Output) -> None:
    """End a job: at once while it waits, else when what it has in hand is done. What it did stays.

    Exit code 1 where it ended by itself, before or meanwhile.
    """
    with target.open(out, models=False) as client, bar(out, "cancelling") as progress:
        job = client.jobs.wait(client.jobs.cancel(job_id), on_progress=progress.job)
    _show(job, out)
    ctx.exit(0 if job.status == "cancelled" else 1)


@jobs.command()
@click.argument("job_id", metavar="JOB")
@click.option("--wait/--no-wait", default=True, help="Follow it to its end.  [default: wait]")
@target_options
@output_options
@click.pass_context
def retry(ctx: click.Context, job_id: str, wait: bool, target: Target, out: Output) -> None:
    """Queue a job again that failed, failed in part or was cancelled, for what it left undone.

    Exit code as of watch; with --no-wait 0, once it is queued.
    """
    with target.open(out, models=wait) as client, bar(out, "waiting") as progress:
        job = client.jobs.retry(job_id)
        if wait:
            job = client.jobs.wait(job, on_progress=progress.job)
    _show(job, out)
    ctx.exit(_EXIT.get(job.status, 1) if wait else 0)


def _show(job: Job, out: Output) -> None:
    counts = job.counts
    pairs: list[tuple[str, object]] = [
        ("id", job.id),
        ("kind", job.kind),
        ("collection", job.collection),
        ("status", job.status),
        ("progress", progress_text(job.progress)),
        ("documents", counts.documents),
        ("chunks", f"{counts.chunks}: {counts.chunks_prefilled} prefilled, {counts.chunks_reused} reused"),
        ("tokens prefilled", counts.tokens_prefilled),
        ("kv written", bytes_text(counts.kv_bytes_written)),
        ("attempts", job.attempts),
        ("created", job.created_at),
        ("finished", job.finished_at or "not yet"),
    ]
    if job.change is not None:
        pairs.append(("removed", f"{counted(job.change.files, 'file')}, {bytes_text(job.change.bytes)}"))
    if job.snapshot is not None:
        pairs.append(("snapshot", job.snapshot.id))
    if job.cancel_requested and not job.finished_at:
        pairs.append(("cancelled", "when what it has in hand is done"))
    if job.owner:
        pairs.append(("runs in", f"{job.owner}, last heard of {job.heartbeat_at}"))
    if job.verification is not None:
        pairs.append(("problems", f"{job.verification.found}, {job.verification.repaired} of them repaired"))
    for item in job.failed:
        pairs += [
            ("failed", f"{item.document_id}: {item.problem.detail}"),
            ("hint", item.problem.hint),
        ]
    for problem in job.errors[len(job.failed) :]:  # of the job as a whole
        pairs += [("error", problem.detail), ("hint", problem.hint)]
    out.fields(job, pairs)
