"""`memkv doctor`: what this installation stands on, and the command that mends what is missing."""

from __future__ import annotations

import errno
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.db import inspect_database
from memkv.cli.doctor_store import check_clock, check_files, check_fingerprints
from memkv.cli.findings import Finding, print_findings
from memkv.cli.output import Output, bytes_text, counted, output_options
from memkv.cli.target import Target, embedded_options
from memkv.errors import ExtensionMissing, MemKVError

if TYPE_CHECKING:
    from memkv.config import Config

_LEAST_FREE = 500_000_000  # bytes


@click.command()
@click.option(
    "--fix",
    is_flag=True,
    help="Mend what can be mended: install missing models, upgrade the schema after a backup, mend modes, "
    "remove block files that have no row or no use.",
)
@embedded_options
@output_options
@click.pass_context
def doctor(ctx: click.Context, fix: bool, target: Target, out: Output) -> None:
    """Check this installation and its store, and say how to mend them. Without --fix nothing is changed.

    Exit code 1 where something does not work; what is only a warning leaves it 0.
    """
    config = target.config()
    found = [finding for check in CHECKS for finding in check(config)]
    mended: list[str] = []
    if fix and any(finding.mend for finding in found):
        mended = _mend(found, out)
        found = [finding for check in CHECKS for finding in check(config)]
    if out.is_json:
        out.json({"findings": [_plain(finding) for finding in found], "mended": mended})
    else:
        print_findings(found)
    ctx.exit(1 if any(finding.state == "failed" for finding in found) else 0)


def _mend(findings: Sequence[Finding], out: Output) -> list[str]:
    """Mends what can be mended, each thing once; returns what was done, one sentence for each."""
    done: list[str] = []
    seen: list[partial[str]] = []
    for finding in findings:
        if finding.mend is None or any(_same(finding.mend, other) for other in seen):
            continue
        seen.append(finding.mend)
        out.note(f"mending {finding.name}: {finding.detail}")
        try:
            done.append(f"{finding.name}: {finding.mend()}")
        except MemKVError as error:
            out.note(f"could not be mended: {error.detail} ({error.hint})")
        else:
            out.note(f"mended {done[-1]}")
    return done


def _same(one: partial[str], other: partial[str]) -> bool:
    return (one.func, one.args) == (other.func, other.args)


def _plain(finding: Finding) -> dict[str, object]:
    return {name: getattr(finding, name) for name in ("name", "state", "detail", "fix")}


def check_python(config: Config) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def check_kernels(config: Config) -> Iterator[Finding]:
    try:
        from memkv.kernels import ops
    except ImportError as error:
        yield Finding("kernels", "failed", f"cannot be imported: {error}", "pip install 'memkv[cpu]'")
        return
    try:
        threads = ops.num_threads()
    except ExtensionMissing as error:
        yield Finding("kernels", "failed", error.detail, error.hint)
        return
    runnable = ", ".join(ops.runnable_isas())
    yield Finding("kernels", "ok", f"built; {ops.isa()} of {runnable}; {counted(threads, 'thread')}")


def check_torch(config: Config) -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        yield Finding("torch", "failed", "is not installed", "pip install 'memkv[cpu]'")
        return
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else "CPU"
    yield Finding("torch", "ok", f"{torch.__version__} on {device}")
    if config.model.device.startswith("cuda") and not gpu:
        yield Finding(
            "device",
            "failed",
            f"model.device is {config.model.device}, but torch sees no GPU",
            "set MEMKV_DEVICE=cpu",
        )
    elif not gpu and shutil.which("nvidia-smi") and torch.version.cuda is None:
        yield Finding(
            "device",
            "warning",
            "there is an NVIDIA driver, but this torch is for CPUs",
            "make install HARDWARE=gpu",
        )
    from importlib import metadata

    try:
        yield Finding("transformers", "ok", metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        yield Finding("transformers", "failed", "is not installed", "pip install 'memkv[cpu]'")


def check_faiss(config: Config) -> Iterator[Finding]:
    """Several packages install a module called faiss; two of them at once overwrite each other."""
    from importlib import metadata

    owners = sorted(set(metadata.packages_distributions().get("faiss", ())))
    if len(owners) > 1:
        keep = "faiss-cpu" if "faiss-cpu" in owners else owners[0]
        fix = f"pip uninstall -y {' '.join(owners)} && pip install {keep}"
        yield Finding("faiss", "failed", f"{' and '.join(owners)} are both installed", fix)
    elif not owners:
        yield Finding("faiss", "failed", "is not installed", "pip install faiss-cpu")
    else:
        yield Finding("faiss", "ok", f"{owners[0]} {metadata.version(owners[0])}")


def check_database(config: Config) -> Iterator[Finding]:
    try:
        database = importlib.import_module("memkv.store.database")
    except ImportError as error:
        yield Finding("database", "failed", f"cannot be opened: {error}", "pip install memkv")
        return
    if not config.store.database_url:
        import sqlite3

        driver = database.sqlite_driver
        bundled = "" if driver.sqlite_version != sqlite3.sqlite_version else " (Python's own)"
        old = driver.sqlite_version_info < (3, 51, 3)
        detail = f"{driver.sqlite_version}{bundled}"
        if old:
            detail += ": older than 3.51.3, so memkv uses one connection"
        yield Finding("sqlite", "warning" if old else "ok", detail, "pip install pysqlite3" if old else "")
    try:
        found = inspect_database(config)
    except MemKVError as error:
        yield Finding("database", "failed", error.detail, error.hint)
        return
    if found is None:
        yield Finding("database", "ok", "not made yet")
        return
    settings = ", ".join(f"{key} {value}" for key, value in found.settings.items())
    yield Finding("database", "ok", settings)
    if found.current not in (None, found.head):
        yield Finding(
            "schema",
            "failed",
            f"{found.current}, needed is {found.head}",
            "memkv db upgrade",
            partial(_upgrade, config, str(found.current)),
        )


def check_models(config: Config) -> Iterator[Finding]:
    try:
        from memkv.model.install import KNOWN_MODELS, resolve
    except ImportError as error:
        yield Finding("models", "failed", f"cannot be looked up: {error}", "pip install 'memkv[cpu]'")
        return
    root = Path(config.model.models_dir).expanduser() if config.model.models_dir else None
    for name, chosen in (("model", config.model.model), ("embedder", config.model.embedder)):
        try:
            yield Finding(name, "ok", f"{chosen} in {resolve(chosen, root)}")
        except MemKVError as error:
            known = chosen in KNOWN_MODELS
            fix = f"memkv models install {chosen}" if known else error.hint
            mend = partial(_install, chosen, root) if known else None
            yield Finding(name, "failed", error.detail, fix, mend)


def check_disk(config: Config) -> Iterator[Finding]:
    directory = Path(config.store.data_dir).absolute()
    there = next(place for place in (directory, *directory.parents) if place.exists())
    free = shutil.disk_usage(there).free
    detail = f"{bytes_text(free)} free for {directory}"
    if not os.access(there, os.W_OK):
        yield Finding(
            "disk", "failed", f"{there} cannot be written", "give --data-dir DIR, or mend its rights"
        )
    elif free < _LEAST_FREE:
        yield Finding("disk", "failed", detail, "free some space, or give --data-dir DIR on another disk")
    else:
        yield Finding("disk", "ok", detail)


def check_modes(config: Config) -> Iterator[Finding]:
    """KV and texts are as secret as each other: the data directory is its owner's alone."""
    directory = Path(config.store.data_dir).absolute()
    if not directory.is_dir():
        return
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        yield Finding(
            "owner",
            "warning",
            f"{directory} is a link, or another user's",
            "give --data-dir DIR, a directory of your own",
        )
    if directory.stat().st_mode & 0o077:
        yield Finding(
            "modes",
            "warning",
            f"{directory} is open to other users",
            f"chmod go= {directory}",
            partial(_restrict, directory),
        )
    else:
        yield Finding("modes", "ok", f"{directory} is its owner's alone")


def check_parser(config: Config) -> Iterator[Finding]:
    """Documents are cut in a process of their own, which needs no network."""
    from memkv.text.confinement import why_not

    reason = why_not()
    if reason:
        fix = "run memkv in a container without a network of its own, or trust what is ingested"
        yield Finding(
            "parser", "warning", f"the process that cuts documents keeps the network: {reason}", fix
        )
    else:
        yield Finding("parser", "ok", "the process that cuts documents has no network")


def _install(model: str, root: Path | None) -> str:
    from memkv.model.install import install

    return f"installed {model} in {install(model, root)}"


def _restrict(directory: Path) -> str:
    directory.chmod(0o700)
    return f"{directory} is its owner's alone now"


def _upgrade(config: Config, revision: str) -> str:
    """Backs the database up beside the data, then upgrades it."""
    from memkv.cli.db import existing_database
    from memkv.store import Store
    from memkv.store.backup import back_up

    directory = Path(config.store.data_dir)
    copy = directory / f"before-upgrade-from-{revision}"
    with existing_database(config) as database:
        back_up(database, copy)
    Store.open(
        directory,
        config.store.database_url or None,
        upgrade=True,
        busy_seconds=config.store.busy_seconds,
    ).close()
    return f"upgraded from {revision}; the database as it was: {copy}"


def check_port(config: Config) -> Iterator[Finding]:
    import socket

    address = f"{config.server.host}:{config.server.port}"
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.server.host, config.server.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                fix = f"memkv serve --port {config.server.port + 1}"
                yield Finding("port", "warning", f"{address} is taken, perhaps by a running memkv serve", fix)
            else:
                yield Finding(
                    "port", "failed", f"{address}: {error.strerror}", "memkv serve --host 127.0.0.1"
                )
            return
    yield Finding("port", "ok", f"{address} is free")


def check_threads(config: Config) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    detail = f"{counted(cores, 'core')}, load {os.getloadavg()[0]:.1f}"
    if limit.isdigit() and int(limit) > cores:
        yield Finding(
            "threads",
            "warning",
            f"{detail}, but OMP_NUM_THREADS is {limit}",
            f"export OMP_NUM_THREADS={cores}",
        )
        return
    yield Finding("threads", "ok", f"{detail}{f', OMP_NUM_THREADS {limit}' if limit else ''}")


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    check_python,
    check_kernels,
    check_torch,
    check_faiss,
    check_models,
    check_database,
    check_files,
    check_fingerprints,
    check_clock,
    check_disk,
    check_modes,
    check_parser,
    check_port,
    check_threads,
)
