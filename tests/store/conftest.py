"""Every test that asks for `store`, `open_store` or `database` runs on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from postgres_server import MEMORY, PostgresServer, find_binaries, free_bytes, start_server
from store_samples import OpenStore, new_collection

from memkv.store import DEFAULT_TENANT, Store
from memkv.store.database import Database, parse_database_url
from memkv.store.rows import CollectionRow
from memkv.store.schema import require_schema
from memkv.store.tables import Base


@pytest.fixture(scope="session")
def postgres_server() -> PostgresServer:
    url = os.environ.get("MEMKV_TEST_POSTGRES_URL")
    if url:
        return PostgresServer(url)
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL binaries (initdb, pg_ctl) and no MEMKV_TEST_POSTGRES_URL")
    return start_server(binaries)


@pytest.fixture(scope="session")
def postgres_databases(postgres_server: PostgresServer) -> Iterator[list[str]]:
    """Migrated, empty databases that wait for a test: emptying a used one is quicker than making one."""
    waiting: list[str] = []
    yield waiting
    for name in waiting:
        postgres_server.drop_database(name)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, postgres_databases: list[str]) -> Iterator[str]:
    name = postgres_databases.pop() if postgres_databases else postgres_server.create_database()
    url = postgres_server.url(name)
    database = Database(parse_database_url(url, Path()))
    require_schema(database, upgrade=True)
    database.close()
    yield url
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"TRUNCATE {', '.join(Base.metadata.tables)} RESTART IDENTITY CASCADE")
        postgres_databases.append(name)
    except psycopg.Error:  # the test took a table away
        postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str | None:
    """None: the SQLite database inside the data directory."""
    return request.getfixturevalue("postgres_url") if request.param == "postgresql" else None


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where there is room: what is tested is which fsyncs are made and when, not the disk."""
    if free_bytes(MEMORY) < 4 << 30:
        yield tmp_path_factory.mktemp("store")
        return
    path = Path(tempfile.mkdtemp(prefix="memkv-test-", dir=MEMORY))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def open_store(data_dir: Path, database_url: str | None) -> Iterator[OpenStore]:
    """Opens this test's store; what is still open at the end is closed."""
    with ExitStack() as opened:

        def open_it(**options: object) -> Store:
            store = Store.open(data_dir, database_url, **options)  # type: ignore[arg-type]
            opened.callback(store.close)
            return store

        yield open_it


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    return open_store(busy_seconds=2.0)


@pytest.fixture
def collection(store: Store) -> CollectionRow:
    return store.catalog.create_collection(DEFAULT_TENANT, new_collection())


@pytest.fixture
def plain_store(tmp_path: Path) -> Iterator[Store]:
    """On SQLite: what is tested does not depend on the database."""
    with Store.open(tmp_path / "data", busy_seconds=5) as store:
        yield store


@pytest.fixture
def client_programs(database_url: str | None) -> None:
    """Skips where a PostgreSQL server cannot be copied."""
    if database_url is not None and not (
        shutil.which("pg_dump") or list(Path("/usr/lib/postgresql").glob("*/bin/pg_dump"))
    ):
        pytest.skip("pg_dump is not installed")
