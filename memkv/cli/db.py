"""`memkv db upgrade|downgrade|current|check|backup`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.output import Output, bytes_text, counted, output_options
from memkv.cli.progress import bar
from memkv.cli.target import Target, embedded_options

if TYPE_CHECKING:
    from memkv.config import Config
    from memkv.store.database import Database


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """Attributes:
    current: revision of the schema; None where the database is empty.
    head: the revision that this memkv needs.
    settings: what durability hangs on, as the database reports it.
    """

    current: str | None
    head: str
    settings: dict[str, object]


@click.group()
def db() -> None:
    """The database's schema."""


@db.command()
@click.option("--dry-run", is_flag=True, help="Only say from where to where.")
@embedded_options
@output_options
def upgrade(dry_run: bool, target: Target, out: Output) -> None:
    """Bring the schema to what this memkv needs. Back the database up first: memkv db backup FILE."""
    from memkv.store import Store

    config = target.config()
    if dry_run:
        state = inspect_database(config)
        before = state.current if state is not None else None
        size = _size(config)
        _tell_revisions(out, before, state.head if state is not None else "the newest", dry_run, (size, size))
        return
    size = _size(config)
    with (
        bar(out, "upgrading"),
        Store.open(
            Path(config.store.data_dir),
            config.store.database_url or None,
            upgrade=True,
            busy_seconds=config.store.busy_seconds,
        ) as store,
    ):
        found = store.recovery.schema
    _tell_revisions(out, found.current, found.head, dry_run, (size, _size(config)))


@db.command()
@embedded_options
@output_options
@click.pass_context
def current(ctx: click.Context, target: Target, out: Output) -> None:
    """The schema's revision, and the one this memkv needs. Exit code 1 where they differ."""
    found = inspect_database(target.config())
    out.fields(
        found,
        [
            ("current", "empty" if found is None or found.current is None else found.current),
            ("needed", "made at the first use" if found is None else found.head),
        ],
    )
    if found is not None and found.current not in (None, found.head):
        out.note("run: memkv db upgrade")
        ctx.exit(1)


@db.command()
@click.argument("revision")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say whether it can be done.")
@embedded_options
@output_options
def downgrade(revision: str, yes: bool, dry_run: bool, target: Target, out: Output) -> None:
    """Bring the schema back to an older REVISION, for an older memkv. What it cannot hold is lost.

    Needs the store for itself. Back the database up first: memkv db backup FILE.
    """
    from contextlib import ExitStack

    from memkv.store.lock import StoreLock, take_advisory_lock
    from memkv.store.schema import downgrade_schema

    config = target.config()
    if not yes and not dry_run:
        click.confirm(f"Bring the database back to revision {revision}?", abort=True, err=True)
    size = _size(config)
    with bar(out, "downgrading"), ExitStack() as held:
        database = held.enter_context(existing_database(config))
        held.callback(StoreLock(Path(config.store.data_dir) / "lock").release)
        take_advisory_lock(database, held, patience=config.store.busy_seconds)
        found = downgrade_schema(database, revision, dry_run=dry_run)
    _tell_revisions(out, found.current, revision, dry_run, (size, _size(config)))


@db.command()
@embedded_options
@output_options
@click.pass_context
def check(ctx: click.Context, target: Target, out: Output) -> None:
    """Check the database: its own checks, the settings that durability rests on, the schema table by table.

    May run beside a server. Exit code 1 where something is wrong.
    """
    from memkv.store.schema import schema_differences, schema_revision
    from memkv.store.store import durability_warnings

    with bar(out, "checking"), existing_database(target.config()) as database:
        settings = database.settings()
        revision = schema_revision(database)
        problems = [f"damage: {line}" for line in database.find_damage()]
        if revision.is_current:
            problems += [f"schema: {line}" for line in schema_differences(database)]
        else:
            problems.append(f"schema: {revision.current or 'empty'}, needed is {revision.head}")
        warnings = durability_warnings(settings)
        size = database.size()
    out.fields(
        {"problems": problems, "warnings": warnings, "settings": settings, "bytes": size},
        [
            ("size", bytes_text(size)),
            ("settings", ", ".join(f"{key} {value}" for key, value in settings.items())),
            *(("warning", warning) for warning in warnings),
            *(("problem", problem) for problem in problems),
            ("result", counted(len(problems), "problem") if problems else "no problems"),
        ],
    )
    ctx.exit(1 if problems else 0)


@db.command()
@click.argument("copy", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Only say how big the database is.")
@embedded_options
@output_options
def backup(copy: Path, dry_run: bool, target: Target, out: Output) -> None:
    """Write the database, as it is now, to a new FILE. May run beside a server.

    Texts, vectors and everything else that cannot be made again are in it. SQLite: put the file in the place
    of memkv.db; PostgreSQL: pg_restore reads it.
    """
    from memkv.store.backup import back_up

    with bar(out, "copying"), existing_database(target.config()) as database:
        size = database.size() if dry_run else back_up(database, copy)
    found = {"file": str(copy), "bytes": size, "dry_run": dry_run}
    told = f"{copy}, of a database of {bytes_text(size)}" if dry_run else f"{copy} ({bytes_text(size)})"
    out.fields(found, [("would write" if dry_run else "backup", told)])


def _tell_revisions(
    out: Output, before: str | None, after: str, dry_run: bool, sizes: tuple[int, int]
) -> None:
    found = {
        "before": before,
        "would_be" if dry_run else "now": after,
        "bytes_before": sizes[0],
        "bytes_after": sizes[1],
    }
    out.fields(
        found,
        [
            ("before", before or "empty"),
            ("would be" if dry_run else "now", after),
            ("database", f"{bytes_text(sizes[0])} before, {bytes_text(sizes[1])} after"),
        ],
    )


def _size(config: Config) -> int:
    """Bytes of the database; 0 where there is none yet."""
    if inspect_database(config) is None:
        return 0
    with existing_database(config) as database:
        return database.size()


@contextmanager
def existing_database(config: Config) -> Iterator[Database]:
    """The database, without the store's lock. Raises `ConfigError` where there is none yet."""
    from memkv.errors import ConfigError
    from memkv.store.database import Database, parse_database_url

    url = parse_database_url(config.store.database_url or None, Path(config.store.data_dir).absolute())
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        raise ConfigError(
            f"there is no database at {url.database}",
            hint="give --data-dir DIR, or make one: memkv db upgrade",
        )
    database = Database(url, busy_seconds=config.store.busy_seconds)
    try:
        yield database
    finally:
        database.close()


def inspect_database(config: Config) -> DatabaseState | None:
    """The database as it is, without the store's lock and without changing it; None where there is no file.

    Raises:
        ConfigError, DatabaseUnavailable, DatabaseDamaged: it cannot be looked at.
    """
    from memkv.store.database import Database, parse_database_url
    from memkv.store.schema import schema_revision

    url = parse_database_url(config.store.database_url or None, Path(config.store.data_dir).absolute())
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        return None
    database = Database(url, busy_seconds=config.store.busy_seconds)
    try:
        revision = schema_revision(database)
        return DatabaseState(revision.current, revision.head, database.settings())
    finally:
        database.close()
