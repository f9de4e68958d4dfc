"""Ingests documents into a `Memory` and kills itself at the N-th step that changes the disk or the database.

Run in a process of `fault_process`. Every acknowledgement is one line of a file.
"""

from __future__ import annotations

from crash_worker import Killer

from memkv.config import load_config
from memkv.memory import Memory
from memkv.wire import CollectionCreate, DocumentCreate


def work(flags: dict[str, object], kill_at: int, round_: str, said: str) -> None:
    """`kill_at`: N; 0: never. `said`: the file."""
    memory = Memory.open(load_config(flags, env={}))
    memory.create_collection(CollectionCreate(name="c", chunk_tokens=64), exist_ok=True)
    killer = Killer(kill_at)
    killer.install()
    for number in range(3):
        name = f"{round_}-{number}"
        text = "\n\n".join(f"Entry {i} of {name}: the gauge read {i * 37 % 100}." for i in range(8))
        accepted = memory.ingest("c", [DocumentCreate(text=text, external_id=name)])
        say(said, f"accepted {name}")
        assert accepted.job is not None
        if memory.wait_job(accepted.job.id, 60).status == "succeeded":
            say(said, f"ready {name}")
    steps = killer.count
    memory.close()
    say(said, f"steps {steps}")


def say(said: str, line: str) -> None:
    with open(said, "a") as file:
        file.write(f"{line}\n")
