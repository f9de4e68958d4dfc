"""`memkv config show`."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from memkv.cli.output import Output, output_options
from memkv.cli.settings import require_possible

_SECRET = ("database_url",)


@click.group()
def config() -> None:
    """The configuration: flag > environment > file > default."""


@config.command()
@click.option("--origin", is_flag=True, help="Show where each value came from.")
@click.option(
    "--config", "file", type=click.Path(path_type=Path, dir_okay=False), help="Configuration file to read."
)
@output_options
def show(origin: bool, file: Path | None, out: Output) -> None:
    """Every setting and its value."""
    from memkv.config import load_config

    config = require_possible(load_config(file=file))
    rows = [(key, _shown(key, value), source) for key, value, source in config.items()]
    if origin:
        value = [{"key": key, "value": shown, "origin": source} for key, shown, source in rows]
        out.rows(
            value, ("key", "value", "origin"), [(key, _text(shown), source) for key, shown, source in rows]
        )
        return
    out.rows(
        {key: shown for key, shown, _ in rows},
        ("key", "value"),
        [(key, _text(shown)) for key, shown, _ in rows],
    )


def _shown(key: str, value: object) -> object:
    """A database URL without its password."""
    if key.rpartition(".")[2] in _SECRET and isinstance(value, str) and "@" in value and "//" in value:
        scheme, _, rest = value.partition("//")
        user, _, host = rest.rpartition("@")
        return f"{scheme}//{user.partition(':')[0]}:***@{host}"
    return value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
