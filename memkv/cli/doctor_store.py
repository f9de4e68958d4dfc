"""What `memkv doctor` looks for in the store: without its lock, so that it may run beside a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memkv.cli.db import existing_database, inspect_database
from memkv.cli.findings import Finding
from memkv.cli.output import bytes_text, counted
from memkv.errors import MemKVError

if TYPE_CHECKING:
    from memkv.config import Config
    from memkv.store.block_directory import BlockDirectory
    from memkv.store.catalog import Catalog

_PUBLISHING_SECONDS = 0.5  # a server's files stand for a moment before their rows do
_CLOCK_SLACK = timedelta(minutes=1)


def check_files(config: Config) -> Iterator[Finding]:
    """Rows without their file, files without a row, files that nothing refers to."""
    if not _can_look(config):
        return
    from memkv.store.block_directory import BlockDirectory
    from memkv.store.catalog import Catalog

    directory = BlockDirectory(Path(config.store.data_dir).absolute())
    try:
        with existing_database(config) as database:
            catalog = Catalog(database)
            missing, orphans = _compare(catalog, directory)
            if orphans:
                time.sleep(_PUBLISHING_SECONDS)
                orphans &= _compare(catalog, directory)[1]
            unused = catalog.unused_files()
            files, size = catalog.kv_totals()
    except (MemKVError, OSError) as error:
        hint = error.hint if isinstance(error, MemKVError) else "check the data directory's permissions"
        yield Finding("files", "failed", f"cannot be compared with the database: {error}", hint)
        return
    sweep = partial(_sweep, config)
    if missing:
        yield Finding(
            "files",
            "warning",
            f"{counted(missing, 'block file')} of {files} are gone: their chunks are prefilled again on use",
            "memkv store verify --quick --repair, then memkv store reprefill COLLECTION",
            sweep,
        )
    if orphans:
        taken = bytes_text(sum(map(directory.size_of, orphans)))
        detail = f"{counted(len(orphans), 'block file')} without a row, left by a kill, take {taken}"
        yield Finding("orphans", "warning", detail, "memkv store gc", sweep)
    if unused:
        taken = bytes_text(sum(row.num_bytes for row in unused))
        detail = f"{counted(len(unused), 'block file')} that nothing refers to take {taken}"
        yield Finding("unused", "warning", detail, "memkv store gc", sweep)
    if not missing and not orphans and not unused:
        yield Finding("files", "ok", f"{counted(files, 'block file')}, {bytes_text(size)}, one for each row")


def check_fingerprints(config: Config) -> Iterator[Finding]:
    """Collections that the configured model and embedder did not make, as far as their files tell."""
    if not _can_look(config):
        return
    try:
        count, stale = find_stale(config)
    except MemKVError as error:
        yield Finding("fingerprint", "warning", f"cannot be compared: {error.detail}", error.hint)
        return
    for name, differences in stale.items():
        yield Finding(
            "fingerprint",
            "warning",
            f"collection {name} was made with another {', '.join(differences)}: none of its KV is used",
            f"configure the model that made it, or make it anew: memkv store reprefill {name}",
        )
    if not stale and count:
        yield Finding("fingerprint", "ok", f"{counted(count, 'collection')} of this model")


def find_stale(config: Config) -> tuple[int, dict[str, list[str]]]:
    """How many collections there are, and what differs of those that another model made.

    Raises what `stale_collections` and `existing_database` do.
    """
    from memkv.memory.stale import stale_collections
    from memkv.store.catalog import Catalog

    with existing_database(config) as database:
        collections = Catalog(database).all_collections()
    return len(collections), stale_collections(config, collections)


def check_clock(config: Config) -> Iterator[Finding]:
    """Rows from the future: the clock goes wrong now, or did when they were written."""
    if not _can_look(config):
        return
    from memkv.store.catalog import Catalog

    try:
        with existing_database(config) as database:
            count, newest = Catalog(database).rows_from_the_future(_CLOCK_SLACK)
    except MemKVError as error:
        yield Finding("clock", "failed", error.detail, error.hint)
        return
    if newest is None:
        yield Finding("clock", "ok", "no row is from the future")
        return
    yield Finding(
        "clock",
        "warning",
        f"{counted(count, 'row')} from the future, the latest of {newest.isoformat(timespec='seconds')}: "
        "the clock is late, or was early when they were written",
        "set the clock, such as with timedatectl set-ntp true; neither order nor locks go by it",
    )


def _can_look(config: Config) -> bool:
    """Whether there is a database of this memkv's schema; what is wrong with another is said elsewhere."""
    try:
        found = inspect_database(config)
    except (MemKVError, ImportError):
        return False
    return found is not None and found.current == found.head


def _compare(catalog: Catalog, directory: BlockDirectory) -> tuple[int, set[str]]:
    """How many rows lack their file, before and after the look at the files; and files without a row."""
    from memkv.store.block_file import file_name

    before = set(catalog.files_of_all_tenants())
    listing = directory.list()
    after = catalog.files_of_all_tenants()
    missing = [row for row in after if row in before and listing.lacks(row)]
    return len(missing), set(listing.names) - {file_name(row.input_key, row.file_digest) for row in after}


def _sweep(config: Config) -> str:
    """Opens the store, which drops rows whose file is gone, and collects garbage."""
    from memkv.memory.stored import open_store

    with open_store(config) as store:
        removed = store.upkeep.collect_garbage()
        dropped = store.recovery.rows_dropped
    return (
        f"dropped {counted(dropped, 'row')}, removed {counted(removed.files, 'file')}; "
        f"before {bytes_text(removed.bytes_before)}, after {bytes_text(removed.bytes_after)}"
    )
