"""A copy of the database as it is at one moment, and back.

SQLite writes the copy itself (VACUUM INTO); for PostgreSQL its own pg_dump and pg_restore are called.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy.engine import URL

from memkv.errors import ConfigError, DatabaseUnavailable, MemKVError
from memkv.store.database import Database
from memkv.store.durable_files import storage_error, sync_directory, sync_file

_SQLITE_MAGIC = b"SQLite format 3\x00"
_POSTGRES_MAGIC = b"PGDMP"
_SQLITE_SIDE_FILES = ("-wal", "-shm", "-journal")


def back_up(database: Database, path: Path) -> int:
    """Writes a durable copy to a new file; returns its bytes.

    Raises:
        ConfigError: the file exists, its directory does not, or pg_dump is missing.
        DatabaseUnavailable, InsufficientStorageError: nothing is left at `path`.
    """
    if path.exists() or not path.parent.is_dir():
        what = "exists" if path.exists() else "has no directory to lie in"
        raise ConfigError(f"{path} {what}", hint="choose another name")
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        if database.is_sqlite:
            database.copy_to(part)
        else:
            _run(database.url, ["pg_dump", "--format=custom", f"--file={part}"])
        part.chmod(0o600)
        sync_file(part)
        os.rename(part, path)
        sync_directory(path.parent)
    except OSError as error:
        raise storage_error(error) from error
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


def restore(url: URL, path: Path) -> None:
    """Puts the copy in the place of the database. The caller holds the store's lock, and has it closed.

    Raises:
        ConfigError: the file is no copy of such a database, or pg_restore is missing.
        DatabaseUnavailable: pg_restore failed; the database is as it was.
    """
    magic = path.open("rb").read(16) if path.is_file() else b""
    sqlite = url.get_backend_name() == "sqlite"
    if not magic.startswith(_SQLITE_MAGIC if sqlite else _POSTGRES_MAGIC):
        raise ConfigError(
            f"{path} is no backup of a {'SQLite' if sqlite else 'PostgreSQL'} database",
            hint="give a file that memkv db backup wrote",
        )
    if not sqlite:
        _run(url, ["pg_restore", "--clean", "--if-exists", "--single-transaction", "--no-owner", str(path)])
        return
    target = Path(str(url.database))
    part = target.with_name(f"{target.name}.part")
    try:
        shutil.copyfile(path, part)
        part.chmod(0o600)
        sync_file(part)
        if target.is_file():
            _end_log(url)
        for side in _SQLITE_SIDE_FILES:  # of the database that goes; they would be applied to the other
            with suppress(FileNotFoundError):
                target.with_name(target.name + side).unlink()
        os.rename(part, target)
        sync_directory(target.parent)
    except OSError as error:
        raise storage_error(error) from error
    finally:
        part.unlink(missing_ok=True)


def _end_log(url: URL) -> None:
    """Brings what only SQLite's log holds into the database, if that is not damaged: killed between the end
    of the log and the new database's name, it is as it was.
    """
    with suppress(MemKVError), closing(Database(url)) as database:
        database.end_log()


def _run(url: URL, command: Sequence[str]) -> None:
    program = _find(command[0])
    plain = url.set(drivername="postgresql", password=None).render_as_string()
    password = {"PGPASSWORD": str(url.password)} if url.password else {}
    done = subprocess.run(
        [program, f"--dbname={plain}", *command[1:]],
        env={**os.environ, **password},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = " ".join(done.stderr.split())[:300]
        raise DatabaseUnavailable(
            f"{command[0]} failed: {said}", hint=f"see that {command[0]} is as new as the server"
        )


def _find(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        places = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), reverse=True)
        found = places[0] if places else None
    if found is None:
        raise ConfigError(f"{name} is not installed", hint="install PostgreSQL's client programs")
    return found
