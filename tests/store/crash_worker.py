"""Runs a piece of a store's life in a forked child that kills itself at the N-th step that changes anything.

A step is a call into the operating system that writes (through `os`), or a COMMIT: the child dies before it,
or after it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forker import serve
from sqlalchemy.engine.default import DefaultDialect
from store_samples import commit, ingest, new_collection, samples_of

from memkv.store import DEFAULT_TENANT, Store
from memkv.store.chunk_store import ChunkStore
from memkv.store.rows import NewDocument
from memkv.store.snapshots import restore_snapshot

T = DEFAULT_TENANT
STEPS = ("posix_fallocate", "write", "fsync", "link", "unlink", "rename", "mkdir", "ftruncate", "pwrite")


class Killer:
    """Counts steps; at `kill_at` the process is gone."""

    def __init__(self, kill_at: int) -> None:
        self.count = 0
        self._kill_at = kill_at
        self._guard = threading.Lock()

    def step(self) -> None:
        with self._guard:
            self.count += 1
            if self.count == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        def watched(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                self.step()
                return real(*arguments, **options)

            return call

        real_open, real_commit = os.open, DefaultDialect.do_commit

        def opening(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & os.O_CREAT:
                self.step()
            return real_open(path, flags, *arguments, **options)

        def committing(dialect: Any, connection: Any) -> None:
            self.step()
            real_commit(dialect, connection)
            self.step()

        for name in STEPS:
            setattr(os, name, watched(getattr(os, name)))
        os.open = opening  # type: ignore[assignment]
        DefaultDialect.do_commit = committing  # type: ignore[method-assign]


def live(data_dir: Path, url: str | None, round_: int, say: Callable[[str], None]) -> None:
    """One document comes, another is changed, the first goes; every acknowledgement is said."""
    with Store.open(data_dir, url) as store:
        if round_ == 0:
            store.catalog.create_collection(T, new_collection())
            say("collection")
        collection = store.catalog.get_collection(T, "papers")
        arriving, changing = f"arriving {round_}\nshared line\nmore {round_}", f"kept line\nversion {round_}"
        for name, text in ((f"a{round_}", arriving), ("changing", changing)):
            accepted = store.accept_documents(T, collection.id, [NewDocument(text, external_id=name)])
            say(f"accepted {name}")
            if accepted.job is None:
                continue
            job = store.jobs.claim("worker")
            assert job is not None
            if commit(store, accepted.documents[0].document, text).outcome == "ready":
                say(f"ready {name}")
            store.jobs.finish(job.id, "succeeded")
        store.indexes.get(store.catalog.get_collection(T, "papers"))
        store.delete_document(T, collection.id, f"a{round_}")
        say(f"deleted a{round_}")
    say("closed")


def upkeep(data_dir: Path, url: str | None, round_: int, say: Callable[[str], None]) -> None:
    """Garbage collected, KV evicted, a snapshot made, gone back to and deleted."""
    with Store.open(data_dir, url) as store:
        if round_ == 0:
            store.catalog.create_collection(T, new_collection())
        collection = store.catalog.get_collection(T, "papers")
        text = f"kept {round_}\nshared"
        ingest(store, collection, text, external_id=f"a{round_}")
        say(f"ready a{round_}")
        store.chunks.publish([sample.item for sample in samples_of(store, f"left {round_}")])
        store.upkeep.collect_garbage(force=True)
        snapshot = store.snapshots.create()
        store.upkeep.evict()
        store.uses.note(T, [sample.item.input_key for sample in samples_of(store, text)])
    restore_snapshot(data_dir, url, snapshot.id)
    with Store.open(data_dir, url) as store:
        store.snapshots.delete(snapshot.id)
        store.upkeep.compact()
    say("closed")


def publish_only(data_dir: Path, url: str | None, round_: int, say: Callable[[str], None]) -> None:
    with Store.open(data_dir, url) as store:
        store.chunks.publish([sample.item for sample in samples_of(store, f"x {round_}\ny {round_}")])


def rows_first(self: ChunkStore, drafts: Any) -> Any:
    """The mistake that the negative control makes: rows before files."""
    added = self._catalog.register_files([draft.row for draft in drafts])
    for draft in drafts:
        self._directory.link(draft.path, draft.row, draft.identity)
    return added


def run_child(request: dict[str, Any]) -> None:
    acknowledged = os.open(request["acknowledged"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    write = os.write
    if request["variant"] == "rows_first":
        ChunkStore._make_visible = rows_first  # type: ignore[method-assign]
    killer = Killer(request["kill_at"])
    killer.install()
    scenario = {"": live, "upkeep": upkeep}.get(request["variant"], publish_only)
    scenario(
        Path(request["data_dir"]),
        request["url"],
        request["round"],
        lambda words: (write(acknowledged, f"{words}\n".encode()), None)[1],
    )
    write(acknowledged, f"steps {killer.count}\n".encode())


if __name__ == "__main__":
    serve(run_child)
