"""`/v1/jobs`: a job that is cancelled, and tried again."""

from __future__ import annotations

import httpx2
import pytest
from held_engine import HeldEngine
from test_api_routes import TEXT, problem, reply

from memkv.memory import Memory
from memkv.wire import Accepted, Document, Job


def test_a_job_is_cancelled_and_tried_again(
    http: httpx2.Client, memory: Memory, collection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.put(f"/v1/collections/{collection}", json={}).status_code == 201
    documents = f"/v1/collections/{collection}/documents"
    engine = HeldEngine(memory, monkeypatch)
    sent = [http.post(documents, json={"text": f"{TEXT} {name}", "external_id": name}) for name in "ab"]
    running, waiting = (reply(answered, 202, Accepted).job for answered in sent)
    assert engine.reached.wait(30)

    problem(http.post(f"/v1/jobs/{running.id}/retry"), 409, "conflict")
    answered = http.post(f"/v1/jobs/{waiting.id}/cancel")
    assert reply(answered, 202, Job).status == "cancelled", "it waits, so that it ends at once"
    assert answered.headers["location"] == f"/v1/jobs/{waiting.id}"
    asked = reply(http.post(f"/v1/jobs/{running.id}/cancel"), 202, Job)
    assert (asked.status, asked.cancel_requested) == ("running", True)
    engine.open.set()
    again = http.post(f"/v1/jobs/{running.id}/cancel", params={"wait": 60})
    if again.status_code == 202:
        assert reply(again, 202, Job).status in ("cancelled", "succeeded")
    ended = reply(http.get(f"/v1/jobs/{running.id}", params={"wait": 60}), 200, Job)

    refused = problem(http.post(f"/v1/jobs/{waiting.id}/cancel"), 409, "conflict")
    assert f"memkv jobs show {waiting.id}" in refused.hint
    left = reply(http.get(f"{documents}/b"), 200, Document)
    assert left.error is not None
    assert (left.status, left.error.code, left.error.status) == ("failed", "cancelled", 409)
    tried = http.post(f"/v1/jobs/{waiting.id}/retry", headers={"prefer": "wait=60"})
    assert tried.headers["location"] == f"/v1/jobs/{waiting.id}"
    done = reply(tried, 202, Job)
    assert (done.id, done.status, done.errors) == (waiting.id, "succeeded", [])
    assert reply(http.get(f"{documents}/b"), 200, Document).status == "ready"
    problem(http.post(f"/v1/jobs/{waiting.id}/retry"), 409, "conflict")
    if ended.status == "cancelled":
        assert reply(http.post(f"/v1/jobs/{running.id}/retry?wait=60"), 202, Job).status == "succeeded"


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_a_job_that_is_none(http: httpx2.Client, verb: str) -> None:
    problem(http.post(f"/v1/jobs/job_none/{verb}"), 404, "job_not_found")
    problem(http.post(f"/v1/jobs/a%00b/{verb}"), 400, "bad_request")
    problem(http.post(f"/v1/jobs/job_none/{verb}", params={"wait": -1}), 400, "bad_request")
    assert http.get(f"/v1/jobs/job_none/{verb}").status_code == 405
