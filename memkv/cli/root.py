"""The command `memkv`: its subcommands, and how an error becomes one line and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 partly done, 4 server not reachable, 130 interrupted.
"""

from __future__ import annotations

import errno
import traceback

import rich_click as click
from click.exceptions import Exit

from memkv import __version__
from memkv.cli.bench import bench
from memkv.cli.collections import collections
from memkv.cli.config import config
from memkv.cli.db import db
from memkv.cli.demo import demo
from memkv.cli.doctor import doctor
from memkv.cli.documents import documents
from memkv.cli.eval import evaluate
from memkv.cli.ingest import ingest
from memkv.cli.init import init
from memkv.cli.jobs import jobs
from memkv.cli.keys import keys
from memkv.cli.models import models
from memkv.cli.output import printable
from memkv.cli.query import query
from memkv.cli.search import search
from memkv.cli.serve import serve
from memkv.cli.store import store
from memkv.cli.version import version
from memkv.errors import APIConnectionError, APITimeoutError, BadRequestError, MemKVError

FAILED = 1
USAGE = 2
PARTIAL = 3
NOT_REACHABLE = 4
INTERRUPTED = 130


class _Root(click.RichGroup):
    """Nothing that goes wrong in a subcommand reaches the user as a traceback, unless `--debug` asks."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, Exit):
            raise
        except MemKVError as error:
            self._tell(ctx, error.detail, error.hint)
            ctx.exit(exit_code(error))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of our output went away: click ends the process quietly
            self._tell(ctx, *_explain(error))
            ctx.exit(FAILED)

    def _tell(self, ctx: click.Context, detail: str, hint: str) -> None:
        if ctx.params.get("debug"):
            traceback.print_exc()
        click.echo(f"{click.style('error:', fg='red', bold=True)} {_line(detail)}", err=True)
        if hint:
            click.echo(f"{click.style('hint:', bold=True)} {_line(hint)}", err=True)


def exit_code(error: MemKVError) -> int:
    """The process's exit code for an error of memkv's tree."""
    if isinstance(error, APIConnectionError | APITimeoutError):
        return NOT_REACHABLE
    return USAGE if isinstance(error, BadRequestError) else FAILED


def _explain(error: Exception) -> tuple[str, str]:
    """(detail, hint) of an exception that is not memkv's own."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full", "free some space, or give --data-dir DIR on another disk"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("memkv"):
        extra = "plot" if error.name == "matplotlib" else "cpu"
        return f"the package {error.name!r} is not installed", f"run: pip install 'memkv[{extra}]'"
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}", "memkv --debug ... shows the traceback"
    return (
        f"{type(error).__name__}: {error}",
        "this is a bug in memkv, or a broken installation: memkv doctor checks the latter, "
        "memkv --debug ... shows the traceback",
    )


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


@click.command_panel("This machine", commands=["models", "config", "bench", "eval", "doctor", "version"])
@click.command_panel("What is stored", commands=["collections", "documents", "jobs", "store", "keys", "db"])
@click.command_panel("Every day", commands=["init", "demo", "serve", "ingest", "query", "search"])
@click.group(cls=_Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memkv", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("-q", "--quiet", is_flag=True, help="Results only: no progress and no notes.")
def main(debug: bool, quiet: bool) -> None:
    """A memory for language models: documents are read once, kept as blocks of keys and values, and mapped
    into the prompt of whoever asks.

    Commands work on the data directory of this machine; with --url (or MEMKV_URL) they talk to a server.
    """


for _command in (
    init,
    demo,
    serve,
    ingest,
    query,
    search,
    collections,
    documents,
    jobs,
    store,
    keys,
    db,
    models,
    config,
    bench,
    evaluate,
    doctor,
    version,
):
    main.add_command(_command)
