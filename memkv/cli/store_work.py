"""`memkv store verify|warm|reprefill`: what takes long, as jobs that are followed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.output import Output, bytes_text, counted, output_options
from memkv.cli.progress import bar
from memkv.cli.target import Target, target_options

if TYPE_CHECKING:
    from memkv.wire import StoreVerification, StoreWork

_EXIT = {"succeeded": 0, "partial": 3, "failed": 1, "cancelled": 1}


@click.command()
@click.option("--full/--quick", default=True, help="Read every byte, or look at sizes only.  [default: full]")
@click.option(
    "--deep",
    type=click.IntRange(0, 1000),
    default=0,
    metavar="N",
    help="Prefill N chunks again, chosen by chance, and compare.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="Set damaged files aside, their chunks are prefilled again on use; remove what nothing refers to.",
)
@click.option(
    "--max-duration",
    "max_seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Then end, and say what is left; the next one begins with that.",
)
@click.option("--dry-run", is_flag=True, help="Only say how much would be read.")
@target_options
@output_options
@click.pass_context
def verify(
    ctx: click.Context,
    full: bool,
    deep: int,
    repair: bool,
    max_seconds: float | None,
    dry_run: bool,
    target: Target,
    out: Output,
) -> None:
    """Check the database, every index and every block file, those read longest ago first.

    Also told: files that no row names, and files whose key nothing refers to. Exit code 0 where all that was
    looked at is right or repaired, 1 where something is still wrong.
    """
    if max_seconds and not full:
        raise click.UsageError("--max-duration bounds the reading of bytes: leave out --quick")
    with target.open(out, models=deep > 0) as client, bar(out, "verifying") as progress:
        work = client.store.verify(
            full=full,
            deep=deep,
            repair=repair,
            max_seconds=max_seconds or 0,
            dry_run=dry_run,
            on_progress=progress.job,
        )
    if work.job is None or work.job.verification is None:
        _tell_plan(work, "would read", out)
        return
    found = work.job.verification
    _tell_verification(found, repair, out)
    ctx.exit(1 if found.repaired < found.found else 0)


@click.command()
@click.argument("collection")
@click.option("--dry-run", is_flag=True, help="Only say how much would be read.")
@target_options
@output_options
def warm(collection: str, dry_run: bool, target: Target, out: Output) -> None:
    """Read a collection's block files, so that the system has them in memory. Damaged ones are set aside.

    A server also loads chunks, up to engine.warm_share of its pool and host memory.
    """
    with target.open(out, models=False) as client, bar(out, "reading") as progress:
        work = client.store.warm(collection, dry_run=dry_run, on_progress=progress.job)
    _tell_plan(work, "would read" if dry_run else "read", out)


@click.command()
@click.argument("collection")
@click.option("--dry-run", is_flag=True, help="Only say how much would be made.")
@target_options
@output_options
@click.pass_context
def reprefill(ctx: click.Context, collection: str, dry_run: bool, target: Target, out: Output) -> None:
    """Make the KV that a collection lacks: evicted, set aside, or never made.

    A collection that another model made is made anew for the model at hand, from its texts; until that is
    done none of it is found. Exit code 3 where some documents failed.
    """
    with target.open(out) as client, bar(out, "prefilling") as progress:
        work = client.store.reprefill(collection, dry_run=dry_run, on_progress=progress.job)
    _tell_plan(work, "would make" if dry_run else "made", out)
    ctx.exit(_EXIT.get(work.job.status, 1) if work.job else 0)


def _tell_plan(work: StoreWork, verb: str, out: Output) -> None:
    tokens = f" ({counted(work.tokens, 'token')})" if work.tokens else ""
    out.fields(
        work,
        [
            (verb, f"{counted(work.files, 'block file')}{tokens}, {bytes_text(work.bytes)}"),
            ("before", bytes_text(work.bytes_before)),
            ("after", bytes_text(work.bytes_after)),
        ],
    )


def _tell_verification(found: StoreVerification, repair: bool, out: Output) -> None:
    if out.is_json:
        out.json(found)
        return
    deep = f", {counted(found.recomputed, 'chunk')} prefilled again" if found.recomputed else ""
    read = f"{counted(found.files, 'block file')}, {bytes_text(found.bytes)}{deep}"
    problems = counted(found.found, "problem") if found.found else "no problems"
    click.echo(f"{read}, {found.seconds:.1f} s: {problems}")
    if found.files_left:
        left = f"{counted(found.files_left, 'block file')}, {bytes_text(found.bytes_left)}"
        click.echo(f"left for want of time: {left}; the next verification begins with them")
    if repair:
        click.echo(f"before {bytes_text(found.bytes_before)}, after {bytes_text(found.bytes_after)}")
    if found.problems:
        rows = [(p.kind, p.name, p.detail, "yes" if p.repaired else "no") for p in found.problems]
        out.rows(found.problems, ("kind", "name", "detail", "repaired"), rows)
        if not repair:
            out.note("set damaged files aside with: memkv store verify --repair")
