"""The schema's revision: read it, bring it to head, compare it with the tables in code.

A migration runs in one transaction on both databases (`BEGIN IMMEDIATE` makes SQLite's DDL transactional), so
a killed one leaves the old schema or the new one, and is simply run again.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from memkv.errors import BadRequestError, MigrationNeeded
from memkv.store.database import Database
from memkv.store.tables import Base


@dataclass(frozen=True, slots=True)
class SchemaRevision:
    current: str | None  # None: no table of memkv's
    head: str

    @property
    def is_current(self) -> bool:
        return self.current == self.head


def schema_revision(database: Database) -> SchemaRevision:
    with database.read() as connection:
        return _revision(connection)


def require_schema(database: Database, *, upgrade: bool) -> SchemaRevision:
    """Makes the schema of an empty database, and upgrades an older one where `upgrade` allows it.

    Returns the revisions as they were found.

    Raises:
        MigrationNeeded: the schema is older and `upgrade` is false, or newer than this program.
    """
    found = schema_revision(database)
    if found.is_current:
        return found
    if found.current is None or upgrade:
        with database.unfenced_write() as connection:
            found = _revision(connection)
            _require_known(found)
            if not found.is_current:
                config = _config()
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        return found
    _require_known(found)
    raise MigrationNeeded(
        f"the database has schema {found.current}, this memkv needs {found.head}",
        hint="back the database up, then run: memkv db upgrade",
    )


def downgrade_schema(database: Database, revision: str, *, dry_run: bool = False) -> SchemaRevision:
    """Brings the schema back to an older revision, for an older memkv; returns how it was found.

    What only the newer schema can hold is lost. The caller holds the store's lock. `dry_run`: only looks
    whether it could.

    Raises:
        MigrationNeeded: the database is empty, or newer than this program.
        BadRequestError: there is no such older revision.
    """
    with database.unfenced_write() as connection:
        found = _revision(connection)
        _require_known(found)
        if found.current is None:
            raise MigrationNeeded("the database is empty", hint="there is nothing to downgrade")
        older = _older_than(found.current)
        if revision not in older:
            raise BadRequestError(
                f"{revision[:32]!r} is no revision older than {found.current}",
                hint="one of " + ", ".join(older) if older else "it is the first one",
            )
        if not dry_run:
            config = _config()
            config.attributes["connection"] = connection
            command.downgrade(config, revision)
    return found


def _older_than(revision: str) -> list[str]:
    """The revisions before this one, the newest first."""
    script = ScriptDirectory.from_config(_config())
    return [found.revision for found in script.walk_revisions(head=revision)][1:]


def schema_differences(database: Database) -> list[str]:
    """How the migrated schema differs from the tables in code; empty unless someone forgot a migration."""
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return [str(difference) for difference in compare_metadata(context, Base.metadata)]


def _revision(connection: Connection) -> SchemaRevision:
    current = MigrationContext.configure(connection).get_current_revision()
    if current is None:
        ours = set(Base.metadata.tables)
        left_over = ours.intersection(inspect(connection).get_table_names())
        if left_over:
            current = "(none, but tables)"
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None, "bug: there is no migration"
    return SchemaRevision(current, head)


def _require_known(found: SchemaRevision) -> None:
    if found.current is None:
        return
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if found.current not in known:
        raise MigrationNeeded(
            f"the database has schema {found.current}, which this memkv does not know",
            hint="install the memkv that made it, or point MEMKV_DATABASE_URL at another database",
        )


def _config() -> Config:
    # By name: the migrations import the tables, so that a static import would close a circle.
    migrations = importlib.import_module("memkv.migrations")
    assert migrations.__file__ is not None
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    return config
