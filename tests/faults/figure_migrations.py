"""G13: kill -9 before every statement of every migration, from nothing and from each older schema."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime
from pathlib import Path

from alembic import command
from fault_place import POSTGRESQL, Outcome, Place, Stage
from fault_process import SIGKILLED
from sqlalchemy import event, insert, text

from memkv.errors import MemKVError
from memkv.store import schema
from memkv.store.database import Database, parse_database_url
from memkv.store.schema import require_schema, schema_differences, schema_revision
from memkv.store.tables import Tenant


def migrations(place: Place, *, stride: int = 1) -> Outcome:
    outcome = Outcome()
    for start in ("", "0001", "0002", "0003", "0004", "0005"):
        killed, found = _kill_all(place, start, stride, "")
        outcome.runs += killed
        outcome.violations += found
        outcome.notes[start or "empty"] = killed
    weakness = "autocommit_migrations" if place.database == POSTGRESQL else "driver_transactions"
    _, found = _kill_all(place, "", max(stride, 3), weakness)
    outcome.control_detected[weakness] = bool(found)
    return outcome


def _kill_all(place: Place, start: str, stride: int, weakness: str) -> tuple[int, list[str]]:
    found: list[str] = []
    killed = 0
    while True:
        with place.store() as stage:
            stage.data_dir.mkdir()
            at = 1 + killed * stride
            if start:
                assert _run(stage, "prepare_revision", "", revision=start) == 0, stage.nursery.last_words()
            status = _run(stage, "upgrade", weakness, kill_at=at)
            if status not in (0, SIGKILLED):
                found.append(f"from {start or 'empty'}, statement {at}: ended with {status}")
            result = stage.directory / "result"
            if _run(stage, "check_upgrade", "", start=start, result=str(result)) != 0:
                found.append(f"statement {at}: the check failed: {stage.nursery.last_words(300)}")
            else:
                found += [f"statement {at}: {each}" for each in json.loads(result.read_text())]
            if status != SIGKILLED or (found and weakness):
                return killed, found
            killed += 1


def _run(stage: Stage, function: str, weakness: str, **arguments: object) -> int:
    return stage.nursery.run(
        f"figure_migrations:{function}", weakness,
        data_dir=str(stage.data_dir), url=stage.url, **arguments,
    )  # fmt: skip


# In the child


def _open(data_dir: str, url: str | None) -> Database:
    return Database(parse_database_url(url, Path(data_dir)))


def prepare_revision(data_dir: str, url: str | None, revision: str) -> None:
    """An older schema with a row in it."""
    database = _open(data_dir, url)
    config = schema._config()
    with database.unfenced_write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    with database.unfenced_write() as connection:
        connection.execute(insert(Tenant).values(name="kept", secret=bytes(32), created_at=datetime.now(UTC)))
    database.close()


def upgrade(data_dir: str, url: str | None, kill_at: int) -> None:
    database = _open(data_dir, url)
    left = kill_at

    def count(_connection: object, _cursor: object, _statement: str, *_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(database._engine, "before_cursor_execute", count)
    require_schema(database, upgrade=True)
    database.close()


def check_upgrade(data_dir: str, url: str | None, start: str, result: str) -> None:
    """The schema is the old one or the new one; the upgrade, run again, comes to its end."""
    found = []
    database = _open(data_dir, url)
    revision = schema_revision(database)
    if (revision.current or "") not in (start, revision.head):
        found.append(f"the schema is neither old nor new: {revision.current}")
    try:
        require_schema(database, upgrade=True)
        found += [f"differs: {each}" for each in schema_differences(database)]
        if start:
            with database.read() as connection:
                if connection.execute(text("SELECT name FROM tenants")).scalars().all() != ["kept"]:
                    found.append("a row is lost")
    except MemKVError as error:
        found.append(f"does not reach head: {error.detail}")
    database.close()
    Path(result).write_text(json.dumps(found))
