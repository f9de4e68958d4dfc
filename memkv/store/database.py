"""The connection to SQLite or PostgreSQL: transactions, settings, fencing.

Reads run side by side and see one snapshot each. Writes run one after the other: a lock of this process,
`BEGIN IMMEDIATE` on SQLite, and on both databases a first statement that counts the store's generation where
the epoch is still ours. A process that lost the store to another one affects no row there and may not go on.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url, update
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from memkv.errors import ConfigError, DatabaseUnavailable, MemKVError, StoreFenced
from memkv.store.database_errors import damaged, translate
from memkv.store.tables import StoreState

try:
    from pysqlite3 import dbapi2 as sqlite_driver
except ImportError:
    import sqlite3 as sqlite_driver

_READERS = 20  # connections; more readers wait
# Older versions may corrupt a WAL database that has two connections (the WAL-reset bug): they get one.
_SQLITE_SAFE_WITH_TWO = (3, 51, 3)


@dataclass(frozen=True, slots=True)
class WriteTransaction:
    connection: Connection
    generation: int  # of the store, with this transaction; grows with every write
    epoch: int


class Database:
    """Raises from every method: DatabaseUnavailable, DatabaseDamaged, InsufficientStorageError."""

    def __init__(self, url: URL, *, busy_seconds: float = 5.0) -> None:
        self.dialect = url.get_backend_name()  # sqlite | postgresql
        self.busy_seconds = busy_seconds
        self._writer = threading.Lock()
        self._epoch: int | None = None
        self._closed = False
        self._engine = (
            _sqlite_engine(url, busy_seconds) if self.is_sqlite else _postgres_engine(url, busy_seconds)
        )
        event.listen(self._engine, "handle_error", _raise_ours)

    @property
    def url(self) -> URL:
        return self._engine.url

    @property
    def is_sqlite(self) -> bool:
        return self.dialect == "sqlite"

    @property
    def allows_other_writers(self) -> bool:
        """Whether another process may write while this one has it open."""
        return not self.is_sqlite or sqlite_driver.sqlite_version_info >= _SQLITE_SAFE_WITH_TWO

    @property
    def epoch(self) -> int:
        assert self._epoch is not None, "bug: the store is not open"
        return self._epoch

    def adopt_epoch(self, epoch: int) -> None:
        """Every later write is fenced by `epoch`."""
        self._epoch = epoch

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One snapshot of the database."""
        with self._begin(write=False) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[WriteTransaction]:
        """A transaction that commits at the end of the block.

        Raises:
            StoreFenced: another process took the store over.
        """
        with self.unfenced_write() as connection:
            counted = connection.execute(
                update(StoreState)
                .where(StoreState.epoch == self.epoch)
                .values(generation=StoreState.generation + 1)
                .returning(StoreState.generation)
            ).scalar()
            if counted is None:
                raise StoreFenced(
                    "another process took this store over; nothing was written",
                    hint="stop this process and use the other one",
                )
            yield WriteTransaction(connection, counted, self.epoch)

    @contextmanager
    def unfenced_write(self) -> Iterator[Connection]:
        """For opening and migrating, when no epoch is known yet, and for access keys, which need none."""
        with self._writing(), self._begin(write=True) as connection:
            yield connection

    @contextmanager
    def hold_connection(self) -> Iterator[Connection]:
        """A connection outside any transaction, for as long as the block lasts (advisory locks)."""
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield connection

    def settings(self) -> dict[str, object]:
        """What durability hangs on, as the database itself reports it."""
        with self.read() as connection:
            found: dict[str, object] = {"dialect": self.dialect}
            if self.is_sqlite:
                found["version"] = sqlite_driver.sqlite_version
                names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
                for name in names:
                    found[name] = connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                return found
            for name in (
                "server_version",
                "server_encoding",
                "synchronous_commit",
                "fsync",
                "data_checksums",
            ):
                found[name] = connection.exec_driver_sql(f"SHOW {name}").scalar()
            return found

    def find_damage(self) -> list[str]:
        """SQLite's own check of every page and index; PostgreSQL has none that SQL can start."""
        if not self.is_sqlite:
            return []
        with self.read() as connection:
            lines = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars().all()
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        found = [str(line) for line in lines if line != "ok"]
        return found + [f"{row[0]} row {row[1]} refers to a missing row of {row[2]}" for row in broken]

    def size(self) -> int:
        """Bytes that the database takes on its disk, but for its log."""
        with self.read() as connection:
            if self.is_sqlite:
                pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
                return int(pages * connection.exec_driver_sql("PRAGMA page_size").scalar_one())
            return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())

    def unused_bytes(self) -> int:
        """Those of them that deleted rows left; 0 on PostgreSQL, which reuses them by itself."""
        if not self.is_sqlite:
            return 0
        with self.read() as connection:
            pages = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
            return int(pages * connection.exec_driver_sql("PRAGMA page_size").scalar_one())

    def compact(self) -> None:
        """Gives unused space back to the disk, as far as the database can; writers wait meanwhile."""
        with self._writing():
            if not self.is_sqlite:
                with self.hold_connection() as connection:
                    connection.exec_driver_sql("VACUUM (ANALYZE)")
                return
            self._run_outside("VACUUM", ())
            self.end_log()

    def end_log(self) -> None:
        """Brings all of SQLite's log into the database itself."""
        self._run_outside("PRAGMA wal_checkpoint(TRUNCATE)", ())

    def copy_to(self, path: Path) -> None:
        """Writes an SQLite database, as it is now, to a new file."""
        self._run_outside("VACUUM INTO ?", (str(path),))

    def close(self) -> None:
        """Whatever comes later is refused: the store's lock is about to go."""
        self._closed = True
        self._engine.dispose()

    def _run_outside(self, statement: str, parameters: tuple[str, ...]) -> None:
        """On SQLite's driver itself, which begins no transaction: VACUUM runs outside of any."""
        try:
            with closing(self._engine.raw_connection()) as pooled:
                pooled.cursor().execute(statement, parameters)
        except sqlite_driver.Error as error:
            raise translate(error) or error from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer of this process at a time."""
        if not self._writer.acquire(timeout=max(self.busy_seconds, 0)):
            raise DatabaseUnavailable(
                "other writers kept the database busy; nothing was written", hint="retry in a moment"
            )
        try:
            yield
        finally:
            self._writer.release()

    @contextmanager
    def _begin(self, *, write: bool) -> Iterator[Connection]:
        if self._closed:
            raise DatabaseUnavailable("the store is closed", hint="open it again")
        options: dict[str, Any] = {"memkv_write": write}
        if not self.is_sqlite:
            options["isolation_level"] = "READ COMMITTED" if write else "REPEATABLE READ"
        try:
            with self._engine.connect().execution_options(**options) as connection, connection.begin():
                yield connection
        except PoolTimeout as error:
            raise DatabaseUnavailable(
                "every connection to the database is in use", hint="retry in a moment"
            ) from error
        except UnicodeDecodeError as error:  # the driver's, even of its own message
            raise damaged("a text is not UTF-8") from error


def parse_database_url(text: str | None, data_dir: Path) -> URL:
    """Raises ConfigError for a URL that memkv cannot use."""
    if not text:
        return URL.create("sqlite", database=str(data_dir / "memkv.db"))
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise ConfigError(
            "the database URL cannot be parsed", hint="postgresql://user@host/name or sqlite:///path"
        ) from error
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        return url.set(drivername="sqlite", query={})
    if url.get_backend_name() in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise ConfigError(
        f"databases of kind {url.get_backend_name()!r} are not supported",
        hint="postgresql://user@host/name or sqlite:///path",
    )


def _sqlite_engine(url: URL, busy_seconds: float) -> Engine:
    connections = _READERS if sqlite_driver.sqlite_version_info >= _SQLITE_SAFE_WITH_TWO else 1
    engine = create_engine(
        url,
        module=sqlite_driver,
        connect_args={"timeout": busy_seconds, "check_same_thread": False},
        pool_size=connections,
        max_overflow=0,
        pool_timeout=max(busy_seconds, 0.1),
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver begins no transaction by itself
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        # A file system without shared memory cannot do WAL; a rollback journal is safe with EXTRA only.
        connection.execute(f"PRAGMA synchronous={'FULL' if mode == 'wal' else 'EXTRA'}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA cell_size_check=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # Deferred transactions that turn into writers fail at once with SQLITE_BUSY: writers say so first.
        write = connection.get_execution_options().get("memkv_write", True)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _postgres_engine(url: URL, busy_seconds: float) -> Engine:
    arguments: dict[str, Any] = {
        "application_name": f"memkv {os.getpid()}",
        "connect_timeout": max(2, math.ceil(busy_seconds)),
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
    }
    try:
        engine = create_engine(
            url,
            connect_args={name: value for name, value in arguments.items() if name not in url.query},
            pool_size=_READERS,
            max_overflow=0,
            pool_timeout=max(busy_seconds, 0.1),
            pool_pre_ping=True,
        )
    except (ImportError, NoSuchModuleError) as error:
        raise ConfigError(
            "the PostgreSQL driver is not installed", hint="pip install 'memkv[postgres]'"
        ) from error

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.autocommit = True
        connection.execute(f"SET lock_timeout = {max(1, round(busy_seconds * 1000))}")
        connection.execute("SET synchronous_commit = on")
        connection.autocommit = False

    return engine


def _raise_ours(context: ExceptionContext) -> MemKVError | None:
    if context.is_pre_ping:  # a connection that died while it was idle is replaced, not reported
        return None
    return translate(context.original_exception, connecting=context.connection is None)
