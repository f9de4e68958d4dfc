"""Where a command works: on a server through the SDK, or embedded on this machine's data directory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from memkv.cli.log import log_warnings_to_stderr
from memkv.cli.output import Output
from memkv.cli.progress import steps
from memkv.cli.settings import require_possible

if TYPE_CHECKING:
    from memkv.config import Config
    from memkv.sdk.client import MemKV

_FOR_SERVERS = {"engine.compile": False, "engine.host_share": 0.0}  # one command waits longer than they save
_EMBEDDED_ONLY = ("--data-dir", "--model", "--embedder", "--config")


@dataclass(frozen=True, slots=True)
class Target:
    """Attributes:
    url: of a server; empty: embedded.
    api_key: for that server; None: what the environment says.
    flags: `section.key` -> value given on the command line.
    file: the configuration file to read, where one was named.
    """

    url: str
    flags: Mapping[str, object]
    file: Path | None
    api_key: str | None = field(default=None, repr=False)

    def config(self, **more: object) -> Config:
        """The configuration under this command's flags; `more` are further flags, with `__` for the point."""
        from memkv.config import load_config

        extra = {key.replace("__", "."): value for key, value in more.items()}
        return require_possible(load_config({**self.flags, **extra}, file=self.file))

    @property
    def chosen_dir(self) -> str | None:
        """What --data-dir says."""
        chosen = self.flags["store.data_dir"]
        return None if chosen is None else str(chosen)

    @contextmanager
    def open(self, out: Output, *, models: bool = True) -> Iterator[MemKV]:
        """The client: of the server, or of a Memory in this process, which is closed at the end.

        Args:
            models: False for a command that needs none: it starts in a second instead of ten.
        """
        from memkv.sdk.client import MemKV

        if self.url:
            with MemKV(self.url, self.api_key) as client:
                yield client
            return
        config = self.config()
        config = self.config(
            **{key: off for key, off in _FOR_SERVERS.items() if config.origin(key) == "default"}
        )
        log_warnings_to_stderr()
        with steps(out) as tell:
            client = MemKV.local(config=config, on_progress=tell, models=models)
        with client:
            yield client


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command `--url`, `--api-key` and the options of the embedded mode; they arrive as its `target`
    argument."""

    @click.option(
        "--url", metavar="URL", help="Server to talk to; by default MEMKV_URL. Without one: embedded."
    )
    @click.option(
        "--api-key",
        metavar="SECRET",
        help="Key for that server; by default MEMKV_API_KEY, which others here do not see.",
    )
    @embedded_options
    @functools.wraps(command)
    def with_target(
        *args: Any, url: str | None, api_key: str | None, target: Target, **options: Any
    ) -> object:
        given = [name for name, key in zip(_EMBEDDED_ONLY, _keys(target), strict=True) if key is not None]
        if url and given:
            raise click.UsageError(
                f"{given[0]} belongs to the embedded mode, --url to a server: give one of them"
            )
        if url is None and not given:
            url = os.environ.get("MEMKV_URL", "")
        if api_key is not None and not url:
            raise click.UsageError("--api-key is for a server: name it by --url or MEMKV_URL")
        return command(*args, target=Target(url or "", target.flags, target.file, api_key), **options)

    return with_target


def embedded_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a command that never talks to a server."""

    @click.option("--data-dir", metavar="DIR", help="Data directory.  [default: memkv-data]")
    @click.option("--model", metavar="NAME", help="Language model: a directory, an installed or a hub name.")
    @click.option("--embedder", metavar="NAME", help="Embedder: a directory, an installed or a hub name.")
    @click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Configuration file.  [default: memkv.toml]",
    )
    @functools.wraps(command)
    def with_target(
        *args: Any,
        data_dir: str | None,
        model: str | None,
        embedder: str | None,
        file: Path | None,
        **options: Any,
    ) -> object:
        flags = {"store.data_dir": data_dir, "model.model": model, "model.embedder": embedder}
        return command(*args, target=Target("", flags, file), **options)

    return with_target


def _keys(target: Target) -> tuple[object, ...]:
    """The values of `_EMBEDDED_ONLY`, in its order."""
    return (*target.flags.values(), target.file)
