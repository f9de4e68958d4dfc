"""Migrations, from empty to head, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from postgres_server import PostgresServer
from sqlalchemy import Connection, event, inspect, text
from store_samples import found_texts, ingest, is_exact, new_collection, samples_of

from memkv.errors import BadRequestError, MigrationNeeded
from memkv.store import DEFAULT_TENANT, Store, schema
from memkv.store.database import Database, parse_database_url
from memkv.store.rows import PageRequest
from memkv.store.schema import downgrade_schema, require_schema, schema_differences, schema_revision
from memkv.store.tables import Base


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    if request.param == "sqlite":
        yield None
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = server.create_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture
def empty_database(empty_url: str | None, tmp_path: Path) -> Iterator[Database]:
    database = Database(parse_database_url(empty_url, tmp_path))
    yield database
    database.close()


def test_an_empty_database_is_brought_to_head_and_equals_the_tables_in_code(empty_database: Database) -> None:
    assert schema_revision(empty_database).current is None
    assert len(schema_differences(empty_database)) > 5, "the comparison sees nothing"
    assert require_schema(empty_database, upgrade=False).current is None
    assert schema_revision(empty_database).is_current
    assert schema_differences(empty_database) == []


def test_a_migration_killed_at_any_statement_leaves_all_or_nothing(empty_database: Database) -> None:
    class Killed(BaseException):
        pass

    left, done = 0, False

    def count(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        nonlocal left
        if statement.lstrip().startswith(("CREATE", "INSERT", "UPDATE")):
            left -= 1
            if left == 0:
                raise Killed

    event.listen(empty_database._engine, "before_cursor_execute", count)
    for at in range(1, 100):
        left = at
        try:
            require_schema(empty_database, upgrade=True)
        except Killed:
            left = 0
            with empty_database.read() as connection:
                assert inspect(connection).get_table_names() == []
            continue
        done = True
        break
    assert done
    assert at > 15, "the kills missed the migration"
    assert schema_differences(empty_database) == []


def rewrite_revision(database: Database, revision: str) -> None:
    with database.unfenced_write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :r"), {"r": revision})


def test_an_unknown_schema_is_refused_with_a_way_out(empty_url: str | None, tmp_path: Path) -> None:
    with Store.open(tmp_path, empty_url) as store:
        rewrite_revision(store.database, "9999")
    for upgrade in (False, True):
        with pytest.raises(MigrationNeeded, match="9999") as caught:
            Store.open(tmp_path, empty_url, upgrade=upgrade)
        assert caught.value.hint


def test_an_older_schema_waits_for_the_word_to_upgrade(
    empty_url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(tmp_path, empty_url) as store:
        head = store.recovery.schema.head
    # A later memkv: the same migrations and one more, which does nothing.
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "next.py").write_text(
        f'revision = "next"\ndown_revision = "{head}"\ndef upgrade(): pass\ndef downgrade(): pass\n'
    )
    plain = schema._config

    def config_with_one_more() -> Config:
        config = plain()
        versions = Path(config.get_main_option("script_location") or "") / "versions"
        config.set_main_option("version_locations", f"{versions}\n{newer}".replace("%", "%%"))
        config.set_main_option("path_separator", "newline")
        return config

    monkeypatch.setattr(schema, "_config", config_with_one_more)
    with pytest.raises(MigrationNeeded, match=head) as caught:
        Store.open(tmp_path, empty_url)
    assert "memkv db upgrade" in caught.value.hint
    with Store.open(tmp_path, empty_url, upgrade=True) as store:
        assert (store.recovery.schema.current, store.recovery.schema.head) == (head, "next")
        assert schema_revision(store.database).is_current
    Store.open(tmp_path, empty_url).close()


def test_downgrading_to_nothing_removes_every_table(empty_database: Database) -> None:
    require_schema(empty_database, upgrade=False)
    config = schema._config()
    with empty_database.unfenced_write() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    with empty_database.read() as connection:
        assert not set(Base.metadata.tables) & set(inspect(connection).get_table_names())


def test_what_is_stored_survives_every_step_down_and_up(empty_url: str | None, tmp_path: Path) -> None:
    with Store.open(tmp_path, empty_url) as store:
        collection = store.catalog.create_collection(DEFAULT_TENANT, new_collection())
        ingest(store, collection, "one\ntwo", external_id="a")
    database = Database(parse_database_url(empty_url, tmp_path))
    found = schema_revision(database)
    older = schema._older_than(found.head)
    assert len(older) >= 3
    for revision in older:
        assert downgrade_schema(database, revision, dry_run=True).current != revision
        assert schema_revision(database).current != revision, "a dry run changed it"
        assert downgrade_schema(database, revision).current is not None
        assert schema_revision(database).current == revision
    with pytest.raises(BadRequestError):
        downgrade_schema(database, found.head)
    database.close()
    with Store.open(tmp_path, empty_url, upgrade=True) as store:
        collection = store.catalog.get_collection(DEFAULT_TENANT, "papers")
        assert sorted(found_texts(store, collection, "one")) == ["one", "two"]
        assert all(is_exact(store, sample) for sample in samples_of(store, "one\ntwo"))
        assert store.verify(full=True) == []
        assert schema_differences(store.database) == []
        [first, _] = store.catalog.list_files(PageRequest()).rows
        assert first.collection == "papers", "the upgrade does not know whose the files are"
