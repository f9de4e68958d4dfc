"""Kill -9 at the steps of opening, ingesting, changing, deleting, closing, and of keeping a store: what was
acknowledged is there afterwards, and no row points to a file that is not.

MEMKV_TEST_EVERY_KILL=1 tries every step; otherwise a sample of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forker import SIGKILLED, Forker
from store_samples import commit, found_texts, load, samples_of

from memkv.errors import DocumentNotFound
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.chunk_store import ChunkStore, Recovered
from memkv.store.rows import CollectionRow, PageRequest

T = DEFAULT_TENANT


@pytest.fixture(scope="module")
def worker() -> Iterator[Forker]:
    started = Forker("crash_worker.py")
    yield started
    started.close()


def check_and_finish(store: Store, collection: CollectionRow, said: set[str], round_: int) -> None:
    """The promises, then the client's retry."""
    assert [problem for problem in store.verify(full=True) if problem.kind != "orphan"] == []
    assert list((store.data_dir / "tmp").iterdir()) == []
    assert store.catalog.pending_documents() == []
    assert store.jobs.list(T, PageRequest(), status="running").rows == ()
    texts = {
        f"a{round_}": f"arriving {round_}\nshared line\nmore {round_}",
        "changing": f"kept line\nversion {round_}",
    }
    for name, text in texts.items():
        if f"accepted {name}" not in said or f"deleted {name}" in said:
            continue
        try:
            row = store.catalog.get_document(T, collection.id, name)
        except DocumentNotFound:
            assert name != "changing"
            assert f"ready {name}" in said, f"{name} was acknowledged and is gone"
            continue  # killed within its deletion
        assert store.catalog.document_text(T, row.id)[1] == text
        if f"ready {name}" in said:
            assert row.status == "ready"
            assert set(text.split("\n")) <= set(found_texts(store, collection, text))
            assert all(load(store, sample.item) is not None for sample in samples_of(store, text))
    if f"deleted a{round_}" in said:
        with pytest.raises(DocumentNotFound):
            store.catalog.get_document(T, collection.id, f"a{round_}")
        assert f"arriving {round_}" not in found_texts(store, collection, f"arriving {round_}")
    while (job := store.jobs.claim("after the crash")) is not None:
        for item in store.jobs.items(T, job.id):
            document = store.catalog.document_by_id(T, item.document_id)
            if document.status == "pending":
                revision, text = store.catalog.document_text(T, document.id)
                assert revision == document.revision
                assert commit(store, document, text).outcome == "ready"
        store.jobs.finish(job.id, "succeeded")
    pages = store.catalog.list_documents(T, collection.id, PageRequest(limit=100)).rows
    assert all(row.status == "ready" for row in pages)
    assert len({row.external_id for row in pages}) == len(pages)
    store.verify(repair=True)
    assert store.verify(full=True) == []
    for row in pages:  # so that rounds do not pile up
        if row.external_id != "changing":
            store.delete_document(T, collection.id, row.id)


@pytest.mark.timeout(1200)
def test_a_kill_at_any_step_loses_nothing(
    worker: Forker, data_dir: Path, tmp_path: Path, database_url: str | None
) -> None:
    every = os.environ.get("MEMKV_TEST_EVERY_KILL") == "1"
    stride = 1 if every else 8 if database_url is None else 18
    acknowledged = tmp_path / "acknowledged"
    kill_at, round_, killed = 0, 0, 0
    reached: set[str] = set()
    while True:
        acknowledged.write_text("")
        status = worker.run(
            data_dir=str(data_dir), url=database_url, kill_at=kill_at, round=round_,
            acknowledged=str(acknowledged), variant="",
        )  # fmt: skip
        said = set(acknowledged.read_text().splitlines())
        if kill_at == 0:
            assert status == 0, "the scenario fails even when nobody kills it"
            assert "closed" in said
        elif status == 0:
            break
        else:
            assert status == SIGKILLED
            killed += 1
        reached |= {words.split()[0] for words in said}
        with Store.open(data_dir, database_url) as store:
            check_and_finish(store, store.catalog.get_collection(T, "papers"), said, round_)
        kill_at, round_ = kill_at + stride, round_ + 1
        if kill_at == stride:
            kill_at = 1
    assert killed >= (60 if every else 5), f"only {killed} kills"
    assert {"accepted", "ready", "deleted"} <= reached


@pytest.mark.timeout(1200)
def test_a_kill_at_any_step_of_upkeep_loses_nothing(
    worker: Forker, data_dir: Path, tmp_path: Path, database_url: str | None
) -> None:
    every = os.environ.get("MEMKV_TEST_EVERY_KILL") == "1"
    stride = 1 if every else 14 if database_url is None else 40
    acknowledged = tmp_path / "acknowledged"
    kill_at, round_, killed = 0, 0, 0
    ready: set[str] = set()
    while True:
        acknowledged.write_text("")
        status = worker.run(
            data_dir=str(data_dir), url=database_url, kill_at=kill_at, round=round_,
            acknowledged=str(acknowledged), variant="upkeep",
        )  # fmt: skip
        said = acknowledged.read_text().splitlines()
        assert status in ((0,) if kill_at == 0 else (0, SIGKILLED))
        ready |= {line.split()[1] for line in said if line.startswith("ready")}
        killed += status == SIGKILLED
        with Store.open(data_dir, database_url) as store:
            check_upkeep(store, ready)
        if status == 0 and kill_at:
            break
        kill_at, round_ = kill_at + stride if kill_at else 1, round_ + 1
    assert killed >= (60 if every else 3), f"only {killed} kills"


def check_upkeep(store: Store, ready: set[str]) -> None:
    """Nothing that was acknowledged is gone, no row lacks its file, and what was begun can be ended."""
    wrong = [p for p in store.verify(full=True) if p.kind not in ("orphan", "unused")]
    assert wrong == []
    collection = store.catalog.get_collection(T, "papers")
    assert {store.catalog.get_document(T, collection.id, name).status for name in ready} <= {"ready"}
    texts = found_texts(store, collection, "shared", k=1000)
    assert {f"kept {name[1:]}" for name in ready} <= set(texts)
    for snapshot in store.snapshots.list():
        store.snapshots.delete(snapshot.id)
    left = list((store.data_dir / "snapshots").glob("*"))
    assert left == [], "a kill left something that nobody removes"
    while (job := store.jobs.claim("after the crash")) is not None:
        for item in store.jobs.items(T, job.id):
            document = store.catalog.document_by_id(T, item.document_id)
            revision, text = store.catalog.document_text(T, document.id)
            if document.status == "pending" and revision == document.revision:
                commit(store, document, text)
        store.jobs.finish(job.id, "succeeded")
    for row in store.catalog.list_documents(T, collection.id, PageRequest(limit=100)).rows:
        store.delete_document(T, collection.id, row.id)  # so that rounds do not pile up
    ready.clear()
    store.upkeep.collect_garbage(force=True)
    assert store.verify(full=True) == []


def test_the_check_notices_a_store_that_names_files_too_early(
    worker: Forker, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: rows before files, and an opening that repairs nothing."""
    monkeypatch.setattr(ChunkStore, "recover", lambda _: Recovered(0, 0, 0))
    noticed = 0
    for kill_at in range(4, 80, 3):
        status = worker.run(
            data_dir=str(data_dir), url=None, kill_at=kill_at, round=kill_at,
            acknowledged=str(tmp_path / "said"), variant="rows_first",
        )  # fmt: skip
        if status == 0:
            break
        with Store.open(data_dir) as store:
            noticed += any(problem.kind == "missing" for problem in store.verify())
        if noticed:
            return
    pytest.fail("rows without files went unnoticed")
