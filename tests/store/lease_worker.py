"""Claims the job that waits, says so, and computes something long that reports nothing.

Arguments: data directory, database URL (empty: SQLite), seconds between two heartbeats.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from memkv.store import Store, jobs


def main() -> None:
    data_dir, url, seconds = sys.argv[1:]
    jobs._HEARTBEAT_SECONDS = float(seconds)
    with Store.open(Path(data_dir), url or None) as store:
        job = store.jobs.claim("the worker")
        assert job is not None
        print(job.id, flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
