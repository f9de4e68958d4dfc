"""`memkv version`."""

from __future__ import annotations

import platform

import rich_click as click

from memkv import __version__
from memkv.cli.output import Output, output_options

_PACKAGES = ("torch", "transformers", "faiss-cpu", "faiss-gpu-cu12", "sqlalchemy", "litestar", "nanobind")


def package_versions() -> dict[str, str]:
    """Version of memkv, Python and each package that answers depend on, where it is installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    found = {"memkv": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = installed_version(name)
        except PackageNotFoundError:
            continue
    return found


@click.command()
@output_options
def version(out: Output) -> None:
    """Versions of memkv and of what it stands on."""
    found = package_versions()
    out.fields(found, list(found.items()))
