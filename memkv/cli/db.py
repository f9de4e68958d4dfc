"""`memkv db upgrade|current`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.output import Output, output_options
from memkv.cli.target import Target, embedded_options

if TYPE_CHECKING:
    from memkv.config import Config


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
@embedded_options
@output_options
def upgrade(target: Target, out: Output) -> None:
    """Bring the schema to what this memkv needs. Back the database up first."""
    from memkv.store import Store

    config = target.config()
    with Store.open(
        Path(config.store.data_dir),
        config.store.database_url or None,
        upgrade=True,
        busy_seconds=config.store.busy_seconds,
    ) as store:
        found = store.recovery.schema
    out.fields(
        {"before": found.current, "now": found.head},
        [("before", found.current or "empty"), ("now", found.head)],
    )


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
