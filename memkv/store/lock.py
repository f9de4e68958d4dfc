"""Who may open a store: one process at a time.

`flock` on a file of the data directory, held for the life of the process, so that a killed holder leaves
nothing behind; on PostgreSQL also an advisory lock, since two data directories may name one database. Neither
is trusted alone: the epoch in every write transaction (`database.py`) fences a holder that lost its lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from sqlalchemy import text

from memkv.errors import ConfigError, StoreLocked
from memkv.store.database import Database

_ADVISORY_KEY = 0x6D656D6B76  # "memkv"; PostgreSQL keeps these keys apart by database
_TRY_LOCK = text("SELECT pg_try_advisory_lock(:key)")
_FIND_HOLDER = text(
    "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid"
    " WHERE l.locktype = 'advisory' AND l.granted"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND (l.classid::bigint << 32) | l.objid::bigint = :key"
)
_PID_WAIT_SECONDS = 0.2  # between taking the lock and writing the pid lies a moment


class StoreLock:
    """The `lock` file of a data directory. Raises StoreLocked, with the holder's pid, where it is taken."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the store's lock file cannot be opened: {error.strerror}",
                hint="check the data directory's owner and permissions",
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._read_holder() if error.errno in (errno.EAGAIN, errno.EACCES) else None
            os.close(self._fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise ConfigError(
                    f"the store cannot be locked: {error.strerror}",
                    hint="use a data directory on a file system that knows flock",
                ) from error
            raise _locked(f"process {holder}" if holder else "another process") from error
        with suppress(OSError):  # on a full disk nobody is told who holds it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)

    def _read_holder(self) -> int | None:
        deadline = time.monotonic() + _PID_WAIT_SECONDS
        while True:
            match = re.match(rb"\d+", os.pread(self._fd, 32, 0))
            if match or time.monotonic() > deadline:
                return int(match[0]) if match else None
            time.sleep(0.01)


def take_advisory_lock(database: Database, held: ExitStack, *, patience: float) -> None:
    """Holds the database's advisory lock until `held` closes; nothing to do on SQLite.

    Waits up to `patience` seconds: the server notices a killed holder only moments later.
    Raises StoreLocked, with the pid that the holder gave as its application name.
    """
    if database.is_sqlite:
        return
    connection = held.enter_context(database.hold_connection())
    deadline = time.monotonic() + patience
    while not connection.execute(_TRY_LOCK, {"key": _ADVISORY_KEY}).scalar():
        if time.monotonic() > deadline:
            name = connection.execute(_FIND_HOLDER, {"key": _ADVISORY_KEY}).scalar()
            match = re.fullmatch(r"memkv (\d+)", name or "")
            raise _locked(f"process {match[1]}" if match else "another process")
        time.sleep(0.02)


def _locked(holder: str) -> StoreLocked:
    return StoreLocked(
        f"the store is in use by {holder}",
        hint="stop it first, talk to it over HTTP, or choose another data directory (MEMKV_DATA_DIR)",
    )
