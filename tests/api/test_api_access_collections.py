"""A key for some collections sees nothing of the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from guarded_server import Guarded, guarded, refused, serve, stored_config

from memkv.memory.stored import StoredMemory
from memkv.store.rows import DEFAULT_TENANT

__all__ = ["guarded"]


class TestSomeCollections:
    """Questions, of a memory that answers without a model."""

    @pytest.fixture
    def mine(self, guarded: Guarded) -> Callable[..., httpx2.Response]:
        for name in ("mine", "theirs"):
            path = f"/v1/collections/{name}"
            assert guarded.ask(guarded.admin.secret, "PUT", path, json={}).status_code in (200, 201)
            sent = guarded.ask(guarded.admin.secret, "PUT", f"{path}/documents/d", json={"text": name})
            assert sent.status_code in (200, 202)
        secret = guarded.key(scope="write", collections=["mine", "new"]).secret
        return lambda *asked, **more: guarded.ask(secret, *asked, **more)

    @pytest.mark.parametrize("path", ["/v1/search", "/v1/query"])
    def test_questions(self, mine: Callable[..., httpx2.Response], path: str) -> None:
        assert mine("POST", path, json={"query": "q", "collection": "mine"}).status_code == 200
        for other in ("theirs", "none"):
            for more in ({}, {"stream": True} if path == "/v1/query" else {}):
                response = mine("POST", path, json={"query": "q", "collection": other, **more})
                problem = refused(response, 403)
                assert problem["detail"] == f"the access key is not for collection {other}"

    def test_collections(self, mine: Callable[..., httpx2.Response]) -> None:
        assert [each["name"] for each in mine("GET", "/v1/collections").json()["data"]] == ["mine"]
        refused(mine("POST", "/v1/collections", json={"name": "other"}), 403)
        refused(mine("PUT", "/v1/collections/other", json={}), 403)
        assert mine("POST", "/v1/collections", json={"name": "new"}).status_code == 201
        assert mine("DELETE", "/v1/collections/new").status_code == 204
        refused(mine("GET", "/v1/collections/theirs"), 403)
        refused(mine("DELETE", "/v1/collections/theirs"), 403)
        refused(mine("GET", "/v1/collections/th%65irs"), 403)

    def test_jobs(self, guarded: Guarded, mine: Callable[..., httpx2.Response]) -> None:
        every = guarded.ask(guarded.admin.secret, "GET", "/v1/jobs", params={"limit": 100}).json()["data"]
        theirs = [job["id"] for job in every if job["collection"] == "theirs"]
        assert theirs
        found = mine("GET", "/v1/jobs").json()["data"]
        assert found
        assert {job["collection"] for job in found} == {"mine"}
        refused(mine("GET", "/v1/jobs", params={"collection": "theirs"}), 403)
        assert mine("GET", "/v1/jobs", params={"collection": "mine"}).status_code == 200
        assert refused(mine("GET", f"/v1/jobs/{theirs[0]}"), 404)["code"] == "job_not_found"
        assert mine("GET", f"/v1/jobs/{found[0]['id']}").status_code == 200

    def test_the_whole_store(self, mine: Callable[..., httpx2.Response]) -> None:
        assert mine("GET", "/v1/info").status_code == 200
        refused(mine("GET", "/metrics"), 403)
        refused(mine("POST", "/v1/store/export", json={"archive": "a.tar", "collections": ["mine"]}), 403)
        refused(mine("POST", "/v1/store/evict", json={"collection": "mine"}), 403)
        refused(mine("GET", "/v1/keys"), 403)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Guarded, StoredMemory]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
    from store_samples import ingest, new_collection

    config = stored_config(tmp_path_factory.mktemp("stored"))
    with StoredMemory.open_store(config) as memory:
        catalog = memory._store.catalog
        fingerprint = '{"weights_digest": "0"}'
        for name in ("mine", "theirs"):
            new = new_collection(name, model_name="tiny", fingerprint_json=fingerprint)
            row = catalog.create_collection(DEFAULT_TENANT, new)
            ingest(memory._store, row, f"text of {name}", external_id=f"{name}.txt")
        memory._store.jobs.create(DEFAULT_TENANT, "", "verify", ())
        yield from ((each, memory) for each in serve(memory, memory.keys))


class TestSomeCollectionsOfAStore:
    """What is listed and guessed, of a real store."""

    def test_ids_of_others_are_as_unknown_as_random_ones(self, stored: tuple[Guarded, StoredMemory]) -> None:
        guarded, _ = stored
        secret = guarded.key(collections=["mine"]).secret
        ids = {}
        for name in ("mine", "theirs"):
            path = f"/v1/collections/{name}/documents"
            (document,) = guarded.ask(guarded.admin.secret, "GET", path).json()["data"]
            ids[name] = document["id"]
        jobs = guarded.ask(guarded.admin.secret, "GET", "/v1/jobs").json()["data"]
        other_jobs = [job["id"] for job in jobs if job["collection"] != "mine"]
        assert len(other_jobs) == 2
        assert guarded.ask(secret, "GET", f"/v1/collections/mine/documents/{ids['mine']}").status_code == 200
        guesses = [(f"/v1/collections/mine/documents/{ids['theirs']}", ids["theirs"])]
        guesses += [(f"/v1/jobs/{job}", job) for job in other_jobs]
        for path, guessed in guesses:
            found = refused(guarded.ask(secret, "GET", path), 404)
            other_id = guessed[:4] + "0" * 32
            random = refused(guarded.ask(secret, "GET", path.replace(guessed, other_id)), 404)
            for field in ("code", "title", "hint", "type"):
                assert found[field] == random[field]
            assert found["detail"].replace(guessed, other_id) == random["detail"]
        refused(guarded.ask(secret, "GET", f"/v1/collections/theirs/documents/{ids['theirs']}"), 403)

    def test_lists_are_filtered_on_every_page(self, stored: tuple[Guarded, StoredMemory]) -> None:
        guarded, _ = stored
        secret = guarded.key(collections=["mine"]).secret
        for path in ("/v1/collections", "/v1/jobs"):
            for order in ("asc", "desc"):
                page = guarded.ask(secret, "GET", path, params={"limit": 1, "order": order}).json()
                assert len(page["data"]) == 1
                assert not page["has_more"]

    @pytest.mark.parametrize("verb", ["cancel", "retry"])
    def test_jobs_about_the_store_are_an_administrators(
        self, stored: tuple[Guarded, StoredMemory], verb: str
    ) -> None:
        guarded, _ = stored
        jobs = guarded.ask(guarded.admin.secret, "GET", "/v1/jobs").json()["data"]
        [check] = [f"/v1/jobs/{job['id']}/{verb}" for job in jobs if job["kind"] == "verify"]
        [theirs] = [f"/v1/jobs/{job['id']}/{verb}" for job in jobs if job["collection"] == "theirs"]
        mine = guarded.key(scope="write", collections=["mine"]).secret
        refused(guarded.ask(mine, "POST", check), 404)
        refused(guarded.ask(mine, "POST", theirs), 404)
        write = guarded.key(scope="write").secret
        assert "needs admin" in refused(guarded.ask(write, "POST", check), 403)["detail"]
        assert guarded.ask(write, "POST", theirs).status_code in (202, 409)
        assert guarded.ask(guarded.admin.secret, "POST", check).status_code in (202, 409)
        refused(guarded.ask(guarded.key(scope="read").secret, "POST", theirs), 403)

    def test_after_deletion_nobody_elses_job_is_seen(self, stored: tuple[Guarded, StoredMemory]) -> None:
        guarded, memory = stored
        secret = guarded.key(collections=["mine"]).secret
        memory.delete_collection("mine")
        assert guarded.ask(secret, "GET", "/v1/jobs").json()["data"] == []
