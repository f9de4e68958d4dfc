"""A private PostgreSQL server for one test session: from the system's binaries, on a Unix socket."""

from __future__ import annotations

import atexit
import glob
import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

MEMORY = Path("/dev/shm")


def free_bytes(path: Path) -> int:
    """Zero where there is no such place."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize if os.access(path, os.W_OK) else 0


class PostgresServer:
    """Creates and drops databases on a server that `url` names, as a user that may."""

    def __init__(self, admin_url: str) -> None:
        self._admin_url = admin_url

    def create_database(self) -> str:
        name = f"memkv_test_{uuid.uuid4().hex[:12]}"
        self.run(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return name

    def drop_database(self, name: str) -> None:
        self.run(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def url(self, database: str) -> str:
        head, _, tail = self._admin_url.partition("?")
        return f"{head.rsplit('/', 1)[0]}/{database}" + (f"?{tail}" if tail else "")

    def run(self, statement: Any, parameters: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._admin_url, autocommit=True) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []


def find_binaries() -> Path | None:
    """The directory that holds initdb and pg_ctl."""
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    places += [Path(place) for place in sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)]
    return next((p for p in places if (p / "initdb").exists() and (p / "pg_ctl").exists()), None)


def start_server(binaries: Path) -> PostgresServer:
    """Runs until this process ends. The server refuses to be root, so root runs it as another user."""
    place = MEMORY if free_bytes(MEMORY) > 4 << 30 else None
    home = Path(tempfile.mkdtemp(prefix="memkv-pg-", dir=place))
    as_user: dict[str, Any] = {}
    if os.getuid() == 0:
        account = _unprivileged_account()
        os.chown(home, account.pw_uid, account.pw_gid)
        as_user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    data = home / "data"

    def run(*command: str) -> None:
        done = subprocess.run(
            command, cwd=home, capture_output=True, text=True, check=False, timeout=60, **as_user
        )
        assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"

    run(
        str(binaries / "initdb"), "-D", str(data), "-U", "memkv", "-A", "trust", "-E", "UTF8",
        "--no-locale", "--no-sync", "--data-checksums",
    )  # fmt: skip
    options = (
        f"-c listen_addresses='' -c unix_socket_directories='{home}' -c fsync=off -c full_page_writes=off"
        " -c shared_buffers=32MB -c max_connections=200 -c autovacuum=off"
    )
    log = str(home / "log")
    run(str(binaries / "pg_ctl"), "-D", str(data), "-l", log, "-w", "-o", options, "start")

    def stop() -> None:
        run(str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(home, ignore_errors=True)

    atexit.register(stop)
    return PostgresServer(f"postgresql://memkv@/postgres?host={home}")


def _unprivileged_account() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise AssertionError("there is no unprivileged account to run PostgreSQL as")
