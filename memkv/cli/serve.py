"""`memkv serve`."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.output import Output
from memkv.cli.progress import steps
from memkv.cli.target import Target, embedded_options

if TYPE_CHECKING:
    from memkv.config import Config
    from memkv.memory import Memory


@click.command()
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on; 0: any free one.  [default: 8000]"
)
@click.option(
    "--insecure", is_flag=True, default=None, help="Allow an address other than loopback without any key."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What is logged.")
@click.option("-q", "--quiet", is_flag=True, help="Say only where the server listens.")
@embedded_options
def serve(
    host: str | None,
    port: int | None,
    insecure: bool | None,
    log_level: str | None,
    quiet: bool,
    target: Target,
) -> None:
    """Run the server: REST under /v1, its description at /docs. SIGTERM lets running requests finish."""
    config = target.config(
        server__host=host,
        server__port=port,
        server__insecure=insecure,
        log__level=log_level or ("warning" if quiet else None),
    )
    out = Output(quiet=quiet)
    # By name: the server stands above the command line, and nothing of it is needed for anything else.
    server = importlib.import_module("memkv.api.serve")
    sock = server.listen(config.server, wants_keys=functools.partial(_wants_keys, config))
    server.serve_until_told(
        functools.partial(_open_memory, config, out),
        config,
        sock=sock,
        on_start=lambda url: click.echo(f"memkv listens on {url}"),
    )


def _wants_keys(config: Config) -> bool:
    from memkv.memory.stored import wants_keys

    return wants_keys(config)


def _open_memory(config: Config, out: Output) -> Memory:
    with steps(out) as tell:
        tell("loading the models")
        from memkv.memory import Memory

        return Memory.open(config, on_progress=tell)
