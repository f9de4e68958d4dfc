"""Run by Alembic: on the connection of `memkv.store.schema`, or for its own command on MEMKV_* settings."""

from __future__ import annotations

from pathlib import Path

from alembic import context
from sqlalchemy import Connection

from memkv.config import load_config
from memkv.store.database import Database, parse_database_url
from memkv.store.tables import Base


def run_on(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        compare_type=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


def run() -> None:
    if context.is_offline_mode():
        raise SystemExit("memkv migrates a database it is connected to; --sql is not supported")
    given = context.config.attributes.get("connection")
    if given is not None:
        run_on(given)
        return
    store = load_config().store
    data_dir = Path(store.data_dir)
    database = Database(parse_database_url(store.database_url, data_dir), busy_seconds=store.busy_seconds)
    try:
        with database.unfenced_write() as connection:
            run_on(connection)
    finally:
        database.close()


run()
