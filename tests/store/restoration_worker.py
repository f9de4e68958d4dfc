"""Processes that are killed in a restoration: just before the database is replaced, or just after."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from forker import serve
from sqlalchemy.engine import URL

from memkv.store import DEFAULT_TENANT, snapshots
from memkv.store.catalog_jobs import RESTORE
from memkv.store.database import Database, parse_database_url
from memkv.store.jobs import Jobs
from memkv.store.restoration import restore_between
from memkv.store.rows import PageRequest


def run_child(request: dict[str, Any]) -> None:
    data_dir, url = Path(request["data_dir"]), request["url"]
    restore = snapshots.restore

    def killed(where: URL, path: Path) -> None:
        if request["when"] == "after":
            restore(where, path)
        os.kill(os.getpid(), signal.SIGKILL)

    snapshots.restore = killed  # type: ignore[attr-defined]
    database = Database(parse_database_url(url, data_dir))
    jobs = Jobs(database)
    [job] = jobs.list(DEFAULT_TENANT, PageRequest(), kind=RESTORE).rows
    jobs.close()
    database.close()
    restore_between(data_dir, url, job, busy_seconds=5.0)


if __name__ == "__main__":
    serve(run_child)
