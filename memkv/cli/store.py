"""`memkv store stats|verify`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import rich_click as click

from memkv.cli.log import log_warnings_to_stderr
from memkv.cli.output import Output, bytes_text, counted, output_options
from memkv.cli.progress import steps
from memkv.cli.target import Target, embedded_options, target_options


@click.group()
def store() -> None:
    """The block files and the database behind them."""


@store.command()
@target_options
@output_options
def stats(target: Target, out: Output) -> None:
    """What is stored, how big it is, and what was found damaged."""
    with target.open(out) as client:
        found = client.store.stats()
    out.fields(
        found,
        [
            ("data directory", found.data_dir),
            ("collections", found.collections),
            ("documents", found.documents),
            ("chunks", f"{found.chunks} ({counted(found.tokens, 'token')})"),
            ("block files", f"{found.kv_files} ({bytes_text(found.kv_bytes)})"),
            ("database", ", ".join(f"{key} {value}" for key, value in found.database.items())),
            ("pool", ", ".join(f"{count} {state}" for state, count in found.pool.items())),
            ("counters", ", ".join(f"{count} {name}" for name, count in found.counters.items()) or "none"),
            *(("warning", warning) for warning in found.warnings),
        ],
    )


@store.command()
@click.option("--full/--quick", default=True, help="Read every byte, or look at sizes only.  [default: full]")
@click.option(
    "--repair", is_flag=True, help="Set damaged files aside; their chunks are prefilled again on use."
)
@embedded_options
@output_options
@click.pass_context
def verify(ctx: click.Context, full: bool, repair: bool, target: Target, out: Output) -> None:
    """Check the database, every block file and every index. Exit code 1 where something is still wrong.

    Needs the store for itself: stop a server that runs on it.
    """
    config = target.config()
    log_warnings_to_stderr()
    start = time.monotonic()
    with steps(out) as tell:
        tell("verifying")
        from memkv.store import Store

        with Store.open(Path(config.store.data_dir), config.store.database_url or None) as opened:
            problems = opened.verify(full=full, repair=repair)
            files, size = opened.catalog.kv_totals()
    seconds = time.monotonic() - start
    if out.is_json:
        found = {"full": full, "kv_files": files, "kv_bytes": size, "seconds": seconds}
        out.json({**found, "problems": [asdict(problem) for problem in problems]})
    else:
        click.echo(
            f"{counted(files, 'block file')}, {bytes_text(size)}, {seconds:.1f} s: "
            f"{counted(len(problems), 'problem') if problems else 'no problems'}"
        )
        if problems:
            rows = [(p.kind, p.name, p.detail, "yes" if p.repaired else "no") for p in problems]
            out.rows(problems, ("kind", "name", "detail", "repaired"), rows)
            if not repair:
                out.note("set damaged files aside with: memkv store verify --repair")
    ctx.exit(1 if any(not problem.repaired for problem in problems) else 0)
