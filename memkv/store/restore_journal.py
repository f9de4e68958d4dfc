"""What is written down of a restoration before its database is replaced, for the next opening.

The job stands in the database that goes, and not in the one that takes its place: by that an opening after a
kill sees which of the two is there, and tells whoever waits for the job.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from memkv.store.catalog_jobs import RESTORE
from memkv.store.durable_files import Damage, read_file, replace_file
from memkv.store.rows import JobRow

_NAME = "restoring.json"


def write_journal(data_dir: Path, job: JobRow) -> None:
    """Raises InsufficientStorageError, ServiceUnavailableError."""
    kept = {
        "id": job.id,
        "tenant": job.tenant,
        "attempts": job.attempts,
        "created_at": job.created_at.isoformat(),
        "started_at": (job.started_at or job.created_at).isoformat(),
        "arguments": dict(job.arguments),
    }
    replace_file(data_dir / _NAME, data_dir / "tmp" / uuid4().hex, [json.dumps(kept).encode()])


def read_journal(data_dir: Path) -> JobRow | None:
    """The job of a restoration that was begun; None where there is none, or nothing that could be read."""
    data = read_file(data_dir / _NAME, limit=65_536)
    with suppress(ValueError, TypeError, KeyError):
        return None if isinstance(data, Damage) else _job(**json.loads(bytes(data)))
    return None


def remove_journal(data_dir: Path) -> None:
    (data_dir / _NAME).unlink(missing_ok=True)


def _job(
    *, id: str, tenant: str, attempts: int, created_at: str, started_at: str, arguments: dict[str, object]
) -> JobRow:
    return JobRow(
        id=id,
        tenant=tenant,
        collection_id="",
        kind=RESTORE,
        status="running",
        stage="running",
        done=0,
        total=0,
        unit="",
        counts={},
        error=None,
        attempts=attempts,
        cancel_requested=False,
        created_at=datetime.fromisoformat(created_at),
        started_at=datetime.fromisoformat(started_at),
        finished_at=None,
        arguments=arguments,
    )
