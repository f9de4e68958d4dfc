"""Jobs that make room or keep what is there: each may be killed anywhere, and ends at the next opening."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from forker import SIGKILLED, Forker
from small_disk import fill, small_disk
from store_samples import (
    OpenStore,
    flip,
    found_texts,
    ingest,
    load,
    new_collection,
    path_of,
    samples_of,
)

from memkv.config import Config, load_config
from memkv.errors import ConflictError, InsufficientStorageError
from memkv.memory.administration import Administration
from memkv.memory.stored import StoredMemory
from memkv.store import DEFAULT_TENANT, Store, upkeep
from memkv.store.archives import Archives
from memkv.store.database import sqlite_driver
from memkv.store.rows import PageRequest
from memkv.wire import (
    ChangeWork,
    Job,
    SnapshotCreate,
    SnapshotWork,
    StoreChange,
    StoreCompact,
    StoreEvict,
    StoreGC,
    StorePurge,
)

__all__ = ["small_disk"]

T = DEFAULT_TENANT
TEXT = "one\ntwo\nthree"

STARTS: dict[str, Callable[[Administration], ChangeWork | SnapshotWork]] = {
    "gc": lambda admin: admin.gc(StoreGC()),
    "evict": lambda admin: admin.evict(StoreEvict()),
    "compact": lambda admin: admin.compact(StoreCompact()),
    "purge": lambda admin: admin.purge(StorePurge()),
    "snapshot": lambda admin: admin.create_snapshot(SnapshotCreate()),
}
PIECES = {"gc": (1, 2, 0), "evict": (1, 0), "compact": (1, 0), "purge": (1, 2, 0), "snapshot": (1, 3, 0)}


@pytest.fixture(scope="module")
def worker() -> Iterator[Forker]:
    started = Forker("clearance_worker.py")
    yield started
    started.close()


def config_of(data_dir: Path, database_url: str | None = None) -> Config:
    return load_config({"store.data_dir": str(data_dir), "store.database_url": database_url or ""}, env={})


def fill_store(store: Store) -> None:
    """Three chunks, a file that nothing refers to, one that no row names, and two in quarantine."""
    ingest(store, store.catalog.create_collection(T, new_collection()), TEXT, external_id="a")
    store.chunks.publish([sample.item for sample in samples_of(store, "garbage\nhurt\nhurt too")])
    for text in ("hurt", "hurt too"):
        [sample] = samples_of(store, text)
        flip(path_of(store, sample.item), 5000)
        assert load(store, sample.item) is None
    stray = store.data_dir / "blocks" / "00" / f"{'0' * 64}.{'0' * 32}.kv"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"x")
    end_jobs(store)


def end_jobs(store: Store) -> None:
    """As their workers would, so that nothing is kept for them."""
    for job in store.jobs.list(T, PageRequest()).rows:
        store.jobs.finish(job.id, "succeeded")


def block_files(data_dir: Path) -> int:
    return len(list((data_dir / "blocks").glob("*/*.kv")))


@pytest.mark.usefixtures("client_programs")
@pytest.mark.parametrize(
    ("kind", "piece"), [(kind, piece) for kind, pieces in PIECES.items() for piece in pieces]
)
def test_a_killed_job_is_done_at_the_next_opening(
    worker: Forker, open_store: OpenStore, data_dir: Path, database_url: str | None, kind: str, piece: int
) -> None:
    with open_store() as store:
        fill_store(store)
        work = STARTS[kind](Administration(store, Archives(data_dir)))
        assert work.job is not None
    status = worker.run(data_dir=str(data_dir), url=database_url, job=work.job.id, piece=piece)
    assert status == SIGKILLED
    with StoredMemory.open_store(config_of(data_dir, database_url)) as memory:
        job = memory.wait_job(work.job.id, 60)
        assert (job.kind, job.status, job.errors) == (kind, "succeeded", [])
        was_made = kind == "snapshot" and piece == 0  # the opening saw it, and nobody tried again
        assert job.attempts == (1 if was_made else 2)
        check_end(memory._store, job)


def check_end(store: Store, job: Job) -> None:
    left = {"gc": 3, "evict": 1}.get(job.kind, 5)
    assert block_files(store.data_dir) == left
    assert len(store.upkeep.quarantined()) == (0 if job.kind == "purge" else 2)
    assert len(list((store.data_dir / "quarantine").iterdir())) == (0 if job.kind == "purge" else 4)
    snapshots = store.snapshots.list()
    assert {path.name for path in (store.data_dir / "snapshots").glob("*")} == {s.id for s in snapshots}
    if job.kind == "snapshot":
        assert job.snapshot is not None
        assert [snapshot.id for snapshot in snapshots] == [job.snapshot.id]
        assert snapshots[0].kv_files == 4
        assert job.change is None
    else:
        assert snapshots == []
        assert job.change is not None
        assert job.change.failed == 0
        if job.kind != "compact":  # PostgreSQL's own tables may grow meanwhile
            assert job.change.bytes_after <= job.change.bytes_before
    collection = store.catalog.get_collection(T, "papers")
    assert set(found_texts(store, collection, "one")) == {"one", "two", "three"}
    wrong = {problem.kind for problem in store.verify(full=True)}
    assert wrong == {"gc": set(), "evict": {"orphan"}}.get(job.kind, {"orphan", "unused"})


def test_what_is_asked_again_and_again_is_done_each_time(
    open_store: OpenStore, data_dir: Path, database_url: str | None
) -> None:
    with open_store() as store:
        fill_store(store)
    with StoredMemory.open_store(config_of(data_dir, database_url)) as memory:
        for kind in ("gc", "evict", "compact", "purge"):
            plan: StoreChange | None = None
            for _ in range(2):
                work = STARTS[kind](memory.admin)
                assert isinstance(work, ChangeWork)
                assert work.job is not None
                plan = plan or work.change
                ended = memory.wait_job(work.job.id, 60)
                assert (ended.status, ended.progress.unit in ("files", "")) == ("succeeded", True)
                assert ended.change is not None
                assert (ended.change.dry_run, work.change.dry_run) == (False, True)
                assert ended.change.files == work.change.files
            assert plan is not None
            assert work.change.files == 0, "the first left something"
            assert plan.files == {"gc": 2, "evict": 3, "compact": 0, "purge": 2}[kind]


def test_most_of_a_store_is_refused_before_there_is_a_job(open_store: OpenStore, data_dir: Path) -> None:
    store = open_store()
    store.chunks.publish([sample.item for sample in samples_of(store, "\n".join("abcdefghijklmnopqrst"))])
    admin = Administration(store, Archives(data_dir))
    with pytest.raises(ConflictError, match="seldom garbage"):
        admin.gc(StoreGC())
    assert admin.gc(StoreGC(dry_run=True)).change.files == 20
    assert store.jobs.count_by_status()["queued"] == 0
    forced = admin.gc(StoreGC(force=True)).job
    assert forced is not None
    assert forced.status == "queued"


def test_room_is_made_by_jobs_on_a_full_disk(small_disk: Path) -> None:
    """From the job's row to its end: an operator whose disk is full asks for nothing else."""
    with Store.open(small_disk / "data") as store:
        fill_store(store)
    with StoredMemory.open_store(config_of(small_disk / "data")) as memory:
        for kind, files in (("purge", 2), ("gc", 2), ("evict", 3)):
            with closing(sqlite_driver.connect(small_disk / "data" / "memkv.db")) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # no room is left in the log
            fill(small_disk, f"filler {kind}")
            with pytest.raises(InsufficientStorageError):
                memory._store.jobs.create(T, "", "verify", (), arguments={"x": "x" * 100_000})
            work = STARTS[kind](memory.admin)
            assert work.job is not None
            job = memory.wait_job(work.job.id, 60)
            assert (job.status, job.errors) == ("succeeded", [])
            assert job.change is not None
            assert (job.change.files, job.change.failed) == (files, 0)


def test_evicting_looks_up_between_batches(plain_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_BATCH", 2)
    fill_store(plain_store)
    seen: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        seen.append((done, total))
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plain_store.upkeep.evict(on_progress=tell)
    assert seen == [(0, 4), (2, 4)]
    assert [p for p in plain_store.verify(full=True) if p.kind not in ("orphan", "unused")] == []
    assert plain_store.upkeep.evict().files == 2


def test_a_snapshot_that_is_interrupted_leaves_nothing(plain_store: Store) -> None:
    fill_store(plain_store)

    def tell(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plain_store.snapshots.create(on_progress=tell)
    assert list((plain_store.data_dir / "snapshots").iterdir()) == []
    made = plain_store.snapshots.create("snp_" + "1" * 32)
    assert plain_store.snapshots.create(made.id) == made, "it was made twice"
    assert plain_store.snapshots.list() == [made]
