"""Ingests documents into a `Memory` and kills itself at the N-th step that changes the disk or the database.

Arguments: configuration as JSON, N (0: never). Every acknowledgement is one line on standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from crash_worker import Killer

from memkv.config import load_config
from memkv.memory import Memory
from memkv.wire import CollectionCreate, DocumentCreate


def main() -> None:
    flags, kill_at, round_ = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    memory = Memory.open(load_config(flags, env={}))
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64), exist_ok=True)
    killer = Killer(kill_at)
    killer.install()
    for number in range(3):
        name = f"{round_}-{number}"
        text = "\n\n".join(f"Entry {i} of {name}: the gauge read {i * 37 % 100}." for i in range(8))
        accepted = memory.ingest("c", [DocumentCreate(text=text, external_id=name)])
        print(f"accepted {name}", flush=True)
        assert accepted.job is not None
        if memory.wait_job(accepted.job.id, 60).status == "succeeded":
            print(f"ready {name}", flush=True)
    steps = killer.count
    memory.close()
    print(f"steps {steps}", flush=True)


if __name__ == "__main__":
    main()
