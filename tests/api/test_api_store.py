"""`/v1/store` on the real memory: what an operator sees and does, over HTTP."""

from __future__ import annotations

import httpx2
import msgspec
import pytest
from test_api_routes import TEXT, problem, reply

from memkv.wire import (
    Accepted,
    Job,
    Page,
    Quarantine,
    Snapshot,
    SnapshotList,
    StoreChange,
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


def finished(http: httpx2.Client, response: httpx2.Response) -> Job:
    work = reply(response, 202, StoreWork)
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
    plan = reply(http.post("/v1/store/evict", json=asked), 200, StoreChange)
    assert plan.dry_run
    done = reply(http.post("/v1/store/evict", json={"collection": filled}), 200, StoreChange)
    assert (done.files, done.failed) == (plan.files, 0)
    assert len(files_of(http, filled)) == len(before) - plan.files
    job = finished(http, http.post("/v1/store/reprefill", json={"collection": filled}))
    assert job.counts.chunks_prefilled == plan.files
    assert [file.key for file in files_of(http, filled)] == [file.key for file in before]
    nothing = reply(http.post("/v1/store/reprefill", json={"collection": filled}), 200, StoreWork)
    assert (nothing.files, nothing.job) == (0, None)
    warmed = finished(http, http.post("/v1/store/warm", json={"collection": filled}))
    assert warmed.counts.chunks == plan.files + 1, "the prefix too, whoever it was made for"
    problem(http.post("/v1/store/warm", json={"collection": "nothing"}), 404, "collection_not_found")


def test_garbage_quarantine_and_compaction(http: httpx2.Client, filled: str) -> None:
    for path in ("gc", "compact", "quarantine/purge"):
        for dry_run in (True, False):
            answered = http.post(f"/v1/store/{path}", json={"dry_run": dry_run})
            changed = reply(answered, 200, StoreChange)
            assert (changed.dry_run, changed.failed) == (dry_run, 0)
    assert reply(http.get("/v1/store/quarantine"), 200, Quarantine) == Quarantine(files=[], bytes=0)
    files = files_of(http, filled)
    assert msgspec.to_builtins(files[0])["chunks"] == 1
    problem(http.post("/v1/store/gc", json={"all": True}), 400, "bad_request")


def test_snapshots(http: httpx2.Client, filled: str) -> None:
    before = reply(http.get("/v1/store/snapshots"), 200, SnapshotList)
    planned = reply(http.post("/v1/store/snapshots", json={"dry_run": True}), 201, Snapshot)
    assert (planned.id, planned.kv_files > 0) == ("", True)
    assert reply(http.get("/v1/store/snapshots"), 200, SnapshotList) == before
    made = reply(http.post("/v1/store/snapshots", json={}), 201, Snapshot)
    assert made in reply(http.get("/v1/store/snapshots"), 200, SnapshotList).data
    assert http.delete(f"/v1/store/snapshots/{made.id}").status_code == 204
    assert made not in reply(http.get("/v1/store/snapshots"), 200, SnapshotList).data
    problem(http.delete(f"/v1/store/snapshots/{made.id}"), 404, "not_found")
