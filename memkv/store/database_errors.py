"""What a driver's error means: one place that reads error codes of SQLite and PostgreSQL.

No message repeats a path, a statement or a server's address: these errors reach clients. The driver's own
error is kept as the cause.
"""

from __future__ import annotations

from memkv.errors import (
    DatabaseDamaged,
    DatabaseUnavailable,
    InsufficientStorageError,
    MemKVError,
)

RESTORE_HINT = (
    "stop memkv and restore the database from a backup; block files and indexes are made again by themselves"
)
_BUSY_HINT = "close other programs that use the database, or retry in a moment"

# SQLite: https://sqlite.org/rescode.html, primary codes
_SQLITE_DAMAGED = {11, 17, 20, 24, 26}  # CORRUPT, SCHEMA, MISMATCH, FORMAT, NOTADB
_SQLITE_BUSY = {5, 6, 9}  # BUSY, LOCKED, INTERRUPT
_SQLITE_FULL = 13
_SQLITE_FILE = {3, 8, 10, 14, 23}  # PERM, READONLY, IOERR, CANTOPEN, AUTH
_SQLITE_CONSTRAINT = 19
_SQLITE_OTHER_SCHEMA = ("no such table", "no such column", "has no column", "malformed")

# PostgreSQL: appendix A, error codes
_POSTGRES_BUSY = {"55P03", "40P01", "40001", "57014", "55006"}
_POSTGRES_FULL = {"53100"}
_POSTGRES_DAMAGED = {"XX001", "XX002", "42P01", "42703"}  # the last two: a table or column is gone


def translate(error: BaseException, *, connecting: bool = False) -> MemKVError | None:
    """The error of memkv's tree that a driver's `error` stands for; None for a fault of memkv's own.

    `connecting`: there was no connection yet, so that nothing can have been under way.
    """
    if hasattr(error, "sqlstate"):
        return _from_postgres(error, connecting)
    return _from_sqlite(error)


def damaged(what: str) -> DatabaseDamaged:
    return DatabaseDamaged(f"the database is damaged: {what}", hint=RESTORE_HINT)


def _from_sqlite(error: BaseException) -> MemKVError | None:
    text = str(error)
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if primary in _SQLITE_DAMAGED:
        return damaged("SQLite finds it malformed")
    if "Could not decode to UTF-8" in text:
        return damaged("a text is not UTF-8")
    if any(words in text for words in _SQLITE_OTHER_SCHEMA):
        return damaged("its tables are not those that memkv made")
    if primary == _SQLITE_CONSTRAINT:  # every statement checks first: what it checked did not hold
        return damaged("a constraint does not hold")
    if primary == _SQLITE_FULL:
        return InsufficientStorageError(
            "the disk of the database is full; nothing was written", hint="free some space, then retry"
        )
    if primary in _SQLITE_BUSY:
        return DatabaseUnavailable("the database is locked; nothing was written", hint=_BUSY_HINT)
    if primary in _SQLITE_FILE:
        return DatabaseUnavailable(
            "the database file cannot be read or written",
            hint="check its permissions, its disk and that its directory exists",
        )
    return None


def _from_postgres(error: BaseException, connecting: bool) -> MemKVError | None:
    state = getattr(error, "sqlstate", None) or ""
    if state in _POSTGRES_DAMAGED:
        return damaged("PostgreSQL cannot read a table")
    if state[:2] == "23":
        return damaged("a constraint does not hold")
    if state in _POSTGRES_FULL:
        return InsufficientStorageError(
            "the disk of the database is full; nothing was written", hint="free some space, then retry"
        )
    if state in _POSTGRES_BUSY:
        return DatabaseUnavailable("the database is busy; nothing was written", hint=_BUSY_HINT)
    if state[:2] in ("28", "3D"):
        return DatabaseUnavailable(
            "the database refuses the login, or does not exist", hint="check MEMKV_DATABASE_URL"
        )
    connection_lost = type(error).__name__ in ("OperationalError", "InterfaceError", "AdminShutdown")
    if connecting and not state and connection_lost:
        return DatabaseUnavailable(
            "PostgreSQL does not answer", hint="check that it runs and that MEMKV_DATABASE_URL is right"
        )
    if state[:2] in ("08", "53", "57", "58") or (not state and connection_lost):
        return DatabaseUnavailable(
            "the connection to the database failed",
            hint="check that PostgreSQL runs and that MEMKV_DATABASE_URL is right; a repeated request is"
            " recognised, so that retrying is safe",
        )
    return None
