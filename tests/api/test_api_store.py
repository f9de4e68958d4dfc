"""`/v1/store` on the real memory: what an operator sees and does, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec
import pytest
from test_api_routes import TEXT, problem, reply

from memkv.memory import Memory
from memkv.wire import (
    Accepted,
    ArchiveList,
    ArchiveWork,
    ChangeWork,
    Imported,
    Job,
    Page,
    Quarantine,
    Snapshot,
    SnapshotList,
    SnapshotWork,
    StoreFile,
    StoreFileDetail,
    StoreWork,
)


@pytest.fixture
def filled(http: httpx2.Client, collection: str) -> str:
    assert http.put(f"/v1/collections/{collection}", json={}).status_code == 201
    sent = {"text": f"{TEXT} {collection}", "external_id": "port"}
    done = http.post(f"/v1/collections/{collection}/documents", json=sent, params={"wait": 60})
    assert reply(done, 200, Accepted).job.status == "succeeded"
    return collection


def finished(http: httpx2.Client, response: httpx2.Response, kind: Any = StoreWork) -> Job:
    work = reply(response, 202, kind)
    assert response.headers["location"] == f"/v1/jobs/{work.job.id}"
    job: Job = reply(http.get(response.headers["location"], params={"wait": 60}), 200, Job)
    assert job.status == "succeeded", job
    return job


def files_of(http: httpx2.Client, collection: str) -> list[StoreFile]:
    found = http.get("/v1/store/files", params={"collection": collection, "limit": 100})
    files: list[StoreFile] = reply(found, 200, Page[StoreFile]).data
    return files


def test_files(http: httpx2.Client, filled: str) -> None:
    files = files_of(http, filled)
    assert {file.collection for file in files} == {filled}
    shown = reply(http.get(f"/v1/store/files/{files[0].key[:20]}"), 200, StoreFileDetail)
    assert shown.file == files[0]
    assert shown.damage is None
    assert all(
        file.chunks == 0
        for file in reply(http.get("/v1/store/files", params={"unused": "true"}), 200, Page[StoreFile]).data
    )
    problem(http.get("/v1/store/files/" + "0" * 64), 404, "not_found")
    problem(http.get("/v1/store/files/xyz"), 400, "bad_request")
    problem(http.get("/v1/store/files", params={"collection": "nothing"}), 404, "collection_not_found")


def test_a_check(http: httpx2.Client, filled: str) -> None:
    dry = reply(http.post("/v1/store/verify", json={"dry_run": True}), 200, StoreWork)
    assert dry.job is None
    assert dry.bytes > 0
    job = finished(http, http.post("/v1/store/verify", json={"full": True, "deep": 1}))
    assert job.verification is not None
    assert (job.verification.found, job.verification.recomputed) == (0, 1)
    problem(http.post("/v1/store/verify", json={"deep": -1}), 400, "bad_request")


def test_evicted_made_again_and_warmed(http: httpx2.Client, filled: str) -> None:
    before = files_of(http, filled)
    asked = {"collection": filled, "dry_run": True}
    planned = reply(http.post("/v1/store/evict", json=asked), 200, ChangeWork)
    assert (planned.dry_run, planned.job) == (True, None)
    plan = planned.change
    evicted = finished(http, http.post("/v1/store/evict", json={"collection": filled}), ChangeWork)
    done = evicted.change
    assert done is not None
    assert (evicted.kind, evicted.collection) == ("evict", filled)
    assert (done.files, done.failed) == (plan.files, 0)
    assert (evicted.counts.bytes_before, evicted.counts.bytes_after) == (done.bytes_before, done.bytes_after)
    assert done.bytes_before > done.bytes_after
    assert len(files_of(http, filled)) == len(before) - plan.files
    job = finished(http, http.post("/v1/store/reprefill", json={"collection": filled}))
    assert job.counts.chunks_prefilled == plan.files
    assert [file.key for file in files_of(http, filled)] == [file.key for file in before]
    nothing = reply(http.post("/v1/store/reprefill", json={"collection": filled}), 200, StoreWork)
    assert (nothing.files, nothing.job) == (0, None)
    warmed = finished(http, http.post("/v1/store/warm", json={"collection": filled}))
    assert warmed.counts.chunks == plan.files + 1, "the prefix too, whoever it was made for"
    problem(http.post("/v1/store/warm", json={"collection": "nothing"}), 404, "collection_not_found")


@pytest.mark.parametrize("path", ["gc", "compact", "quarantine/purge"])
def test_garbage_quarantine_and_compaction(http: httpx2.Client, filled: str, path: str) -> None:
    would = reply(http.post(f"/v1/store/{path}", json={"dry_run": True}), 200, ChangeWork)
    assert (would.dry_run, would.change.dry_run, would.job) == (True, True, None)
    job = finished(http, http.post(f"/v1/store/{path}", json={}), ChangeWork)
    assert job.change is not None
    assert (job.change.dry_run, job.change.failed) == (False, 0)
    assert reply(http.get("/v1/store/quarantine"), 200, Quarantine) == Quarantine(files=[], bytes=0)
    files = files_of(http, filled)
    assert msgspec.to_builtins(files[0])["chunks"] == 1
    problem(http.post(f"/v1/store/{path}", json={"all": True}), 400, "bad_request")


@pytest.mark.parametrize(
    ("path", "kind"), [("gc", ChangeWork), ("snapshots", SnapshotWork), ("verify", StoreWork)]
)
def test_who_waits_gets_the_finished_job(
    http: httpx2.Client, filled: str, path: str, kind: type[ChangeWork]
) -> None:
    for how in ({"params": {"wait": 60}}, {"headers": {"prefer": "respond-async, wait=60"}}):
        answered = http.post(f"/v1/store/{path}", json={}, **how)
        work = reply(answered, 200, kind)
        assert answered.headers["location"] == f"/v1/jobs/{work.job.id}"
        assert work.job.status == "succeeded"
    problem(http.post(f"/v1/store/{path}", json={}, params={"wait": -1}), 400, "bad_request")
    problem(http.post(f"/v1/store/{path}", json={}, params={"wait": "nan"}), 400, "bad_request")


def test_snapshots(http: httpx2.Client, filled: str) -> None:
    before = reply(http.get("/v1/store/snapshots"), 200, SnapshotList)
    planned = reply(http.post("/v1/store/snapshots", json={"dry_run": True}), 200, SnapshotWork).snapshot
    assert (planned.id, planned.kv_files > 0) == ("", True)
    assert reply(http.get("/v1/store/snapshots"), 200, SnapshotList) == before
    made = made_snapshot(http)
    assert made in reply(http.get("/v1/store/snapshots"), 200, SnapshotList).data
    assert http.delete(f"/v1/store/snapshots/{made.id}").status_code == 204
    assert made not in reply(http.get("/v1/store/snapshots"), 200, SnapshotList).data
    problem(http.delete(f"/v1/store/snapshots/{made.id}"), 404, "not_found")


def made_snapshot(http: httpx2.Client) -> Snapshot:
    job = finished(http, http.post("/v1/store/snapshots", json={}), SnapshotWork)
    assert job.snapshot is not None
    return job.snapshot


def test_a_snapshot_is_restored_only_by_who_serves_again(http: httpx2.Client, filled: str) -> None:
    """`test_api_restore.py` has a server that does."""
    made = made_snapshot(http)
    path = f"/v1/store/snapshots/{made.id}/restore"
    could = reply(http.post(path, json={"dry_run": True}), 200, SnapshotWork)
    assert (could.dry_run, could.snapshot, could.job) == (True, made, None)
    refused = problem(http.post(path, json={}), 409, "conflict")
    assert "memkv store snapshot restore" in refused.hint
    assert http.delete(f"/v1/store/snapshots/{made.id}").status_code == 204
    problem(http.post(path, json={"dry_run": True}), 404, "not_found")
    problem(http.post("/v1/store/snapshots/%2e%2e/restore", json={}), 400, "bad_request")


class TestArchives:
    def test_collections_go_out_and_come_in(self, http: httpx2.Client, memory: Memory, filled: str) -> None:
        asked = {"archive": f"{filled}.tar", "collections": [filled], "kv": True}
        plan = reply(http.post("/v1/store/export", json={**asked, "dry_run": True}), 200, ArchiveWork)
        assert plan.job is None
        assert plan.exported is not None
        assert (plan.exported.documents, plan.exported.collections) == (1, [filled])
        assert filled not in str(reply(http.get("/v1/store/archives"), 200, ArchiveList))
        job = finished(http, http.post("/v1/store/export", json=asked), ArchiveWork)
        assert job.kind == "export"
        assert job.exported is not None
        listed = reply(http.get("/v1/store/archives"), 200, ArchiveList).data
        [file] = [file for file in listed if file.name == f"{filled}.tar"]
        place = Path(memory.store_stats().data_dir) / "archives" / f"{filled}.tar"
        assert file.bytes == job.exported.bytes == place.stat().st_size
        problem(http.post("/v1/store/export", json=asked), 409, "conflict")

        files = {file.key for file in files_of(http, filled)}
        assert http.delete(f"/v1/collections/{filled}").status_code == 204
        look = {"archive": f"{filled}.tar", "dry_run": True}
        looked = finished(http, http.post("/v1/store/import", json=look), ArchiveWork).imported
        assert looked is not None
        assert (looked.documents, looked.dry_run, looked.bytes_after) == (1, True, looked.bytes_before)
        problem(http.get(f"/v1/collections/{filled}"), 404, "collection_not_found")
        again = {"archive": f"{filled}.tar", "kv": True}
        came = finished(http, http.post("/v1/store/import", json=again), ArchiveWork)
        assert (came.kind, came.progress.unit, came.counts.documents) == ("import", "documents", 1)
        assert isinstance(came.imported, Imported)
        assert (came.imported.documents, came.imported.failed) == (1, 0)
        assert came.imported.vectors_taken > 0
        assert came.imported.bytes_after > came.imported.bytes_before
        assert {file.key for file in files_of(http, filled)} == files

        assert http.delete(f"/v1/store/archives/{filled}.tar").status_code == 204
        assert not place.exists()
        problem(http.delete(f"/v1/store/archives/{filled}.tar"), 404, "not_found")
        problem(http.post("/v1/store/import", json=again), 404, "not_found")

    @pytest.mark.parametrize(
        "name", ["../a.tar", "/tmp/a.tar", "a/b.tar", "..", "a.tar\n", "a\u0000.tar", "a.tar.part", "", "a"]
    )
    def test_a_path_is_no_name(self, http: httpx2.Client, memory: Memory, filled: str, name: str) -> None:
        before = sorted(Path(memory.store_stats().data_dir).rglob("*.tar*"))
        for path in ("export", "import"):
            problem(http.post(f"/v1/store/{path}", json={"archive": name}), 400, "bad_request")
        problem(http.post("/v1/store/export", json={"archive": "a.tar", "path": "/tmp"}), 400, "bad_request")
        assert http.delete(f"/v1/store/archives/{quote(name, safe='')}").status_code in (400, 404, 405)
        assert sorted(Path(memory.store_stats().data_dir).rglob("*.tar*")) == before

    def test_a_link_among_the_archives_is_not_followed(
        self, http: httpx2.Client, memory: Memory, filled: str, tmp_path: Path
    ) -> None:
        root = Path(memory.store_stats().data_dir) / "archives"
        root.mkdir(mode=0o700, exist_ok=True)
        (tmp_path / "other.tar").write_bytes(b"not ours")
        (root / "link.tar").symlink_to(tmp_path / "other.tar")
        try:
            problem(http.post("/v1/store/import", json={"archive": "link.tar"}), 404, "not_found")
            problem(http.post("/v1/store/export", json={"archive": "link.tar"}), 409, "conflict")
            problem(http.delete("/v1/store/archives/link.tar"), 404, "not_found")
        finally:
            (root / "link.tar").unlink()
        assert (tmp_path / "other.tar").read_bytes() == b"not ours"

    def test_what_is_no_archive_fails_the_job(self, http: httpx2.Client, memory: Memory, filled: str) -> None:
        root = Path(memory.store_stats().data_dir) / "archives"
        root.mkdir(mode=0o700, exist_ok=True)
        (root / "noise.tar").write_bytes(b"noise" * 1000)
        started = reply(http.post("/v1/store/import", json={"archive": "noise.tar"}), 202, ArchiveWork)
        job = reply(http.get(f"/v1/jobs/{started.job.id}", params={"wait": 60}), 200, Job)
        assert (job.status, job.errors[0].code) == ("failed", "bad_request")
        assert "the archive is refused" in job.errors[0].detail
        problem(
            http.post("/v1/store/export", json={"archive": "b.tar", "collections": ["nothing"]}),
            404,
            "collection_not_found",
        )
        assert not (root / "b.tar").exists()
