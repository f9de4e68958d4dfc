"""Every route on the real memory: what it answers, and the problems that it documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from memkv.wire import (
    Accepted,
    Collection,
    Document,
    Info,
    Job,
    Page,
    Problem,
    QueryCompleted,
    QueryCreated,
    QueryEvent,
    QueryResponse,
    Readiness,
    SearchResponse,
    StoreStats,
)

TEXT = "The lighthouse of Porto Velho was built in 1912. Its keeper was Amalia Reis."


def problem(response: httpx2.Response, status: int, code: str) -> Problem:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found = msgspec.json.decode(response.content, type=Problem)
    assert (found.status, found.code) == (status, code)
    assert found.request_id == response.headers["x-request-id"]
    assert found.detail
    assert found.hint
    return found


def reply(response: httpx2.Response, status: int, kind: Any) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return msgspec.json.decode(response.content, type=kind)


@pytest.fixture
def documents(http: httpx2.Client, collection: str) -> str:
    """The documents' path of a new collection."""
    assert http.post("/v1/collections", json={"name": collection}).status_code == 201
    return f"/v1/collections/{collection}/documents"


@pytest.fixture(scope="session")
def lighthouse(http: httpx2.Client) -> str:
    """A collection that holds one document, ready."""
    name = "lighthouse"
    assert http.put(f"/v1/collections/{name}", json={}).status_code == 201
    sent = {"text": TEXT, "external_id": "port", "metadata": {"lang": "en", "year": 1912}}
    done = http.post(f"/v1/collections/{name}/documents", json=sent, params={"wait": 60})
    assert reply(done, 200, Accepted).job.status == "succeeded"
    return name


class TestService:
    def test_health(self, http: httpx2.Client) -> None:
        assert http.get("/healthz").json() == {"status": "ok"}

    def test_ready(self, http: httpx2.Client) -> None:
        ready = reply(http.get("/readyz"), 200, Readiness)
        assert ready.status == "ready"
        assert all(check.ok for check in ready.checks.values())

    def test_info(self, http: httpx2.Client) -> None:
        info = reply(http.get("/v1/info"), 200, Info)
        assert info.model.block_size == 16
        assert info.embedder.dim == 384

    def test_store_stats(self, http: httpx2.Client, lighthouse: str) -> None:
        stats = reply(http.get("/v1/store/stats"), 200, StoreStats)
        assert stats.documents >= 1
        assert stats.kv_bytes > 0

    def test_unknown_route_and_method(self, http: httpx2.Client) -> None:
        assert problem(http.get("/v1/nothing"), 404, "not_found").hint
        refused = http.patch("/v1/collections")
        problem(refused, 405, "method_not_allowed")
        assert "POST" in refused.headers["allow"]
        assert "method" in refused.json()["detail"]
        assert "POST" in refused.json()["hint"]


class TestCollections:
    def test_create_get_list_delete(self, http: httpx2.Client, collection: str) -> None:
        wanted = {"name": collection, "description": "d", "metadata": {"a": 1}, "chunk_tokens": 32}
        created = http.post("/v1/collections", json=wanted)
        made = reply(created, 201, Collection)
        assert created.headers["location"] == f"/v1/collections/{collection}"
        assert (made.name, made.description, made.metadata, made.chunk_tokens) == (
            collection,
            "d",
            {"a": 1},
            32,
        )
        assert reply(http.get(f"/v1/collections/{collection}"), 200, Collection) == made
        listed = reply(http.get("/v1/collections", params={"limit": 100}), 200, Page[Collection])
        assert collection in [entry.name for entry in listed.data]
        deleted = http.delete(f"/v1/collections/{collection}")
        assert (deleted.status_code, deleted.content) == (204, b"")
        problem(http.get(f"/v1/collections/{collection}"), 404, "collection_not_found")
        problem(http.delete(f"/v1/collections/{collection}"), 404, "collection_not_found")

    def test_put_creates_then_gets(self, http: httpx2.Client, collection: str) -> None:
        path = f"/v1/collections/{collection}"
        made = reply(http.put(path, json={"description": "d"}), 201, Collection)
        assert reply(http.put(path, json={"description": "d", "name": collection}), 200, Collection) == made
        problem(http.put(path, json={"description": "other"}), 409, "conflict")
        refused = problem(http.put(path, json={"name": "another"}), 400, "bad_request")
        assert refused.errors[0].loc == "name"

    def test_twice_is_a_conflict(self, http: httpx2.Client, collection: str) -> None:
        assert http.post("/v1/collections", json={"name": collection}).status_code == 201
        assert problem(http.post("/v1/collections", json={"name": collection}), 409, "collection_exists")

    def test_pages(self, http: httpx2.Client) -> None:
        for name in ("page-a", "page-b", "page-c"):
            http.put(f"/v1/collections/{name}", json={})
        names: list[str] = []
        after = ""
        while True:
            page = reply(
                http.get("/v1/collections", params={"limit": 1, "after": after}), 200, Page[Collection]
            )
            names += [entry.name for entry in page.data]
            assert page.last_id == page.first_id == page.data[0].id
            if not page.has_more:
                break
            after = page.last_id
        assert [name for name in names if name.startswith("page-")] == ["page-a", "page-b", "page-c"]
        assert len(names) == len(set(names))
        newest = reply(
            http.get("/v1/collections", params={"limit": 1, "order": "desc"}), 200, Page[Collection]
        )
        assert newest.data[0].name == names[-1]

    @pytest.mark.parametrize("name", ["a b", "a%00b", "-a", "%2e%2e", "a" * 129, "a%0A", "%ff", "ä"])
    def test_bad_names_in_the_path(self, http: httpx2.Client, name: str) -> None:
        problem(http.get(f"/v1/collections/{name}"), 400, "bad_request")

    @pytest.mark.parametrize(
        ("params", "loc"),
        [
            ({"limit": "0"}, "query.limit"),
            ({"limit": "101"}, "query.limit"),
            ({"limit": "x"}, "query.limit"),
            ({"limit": "9" * 40}, "query.limit"),
            ({"order": "up"}, "query.order"),
            ({"after": "a/b"}, "query.after"),
            ({"after": "a\0"}, "query.after"),
            ({"after": "a", "before": "b"}, "query.after"),
        ],
    )
    def test_bad_pages(self, http: httpx2.Client, params: dict[str, str], loc: str) -> None:
        refused = problem(http.get("/v1/collections", params=params), 400, "bad_request")
        assert [item.loc for item in refused.errors] == [loc]


class TestDocuments:
    def test_text_is_accepted_and_made_ready(self, http: httpx2.Client, documents: str) -> None:
        sent = http.post(documents, json={"text": TEXT, "title": "Port", "external_id": "a/b.txt"})
        accepted = reply(sent, 202, Accepted)
        assert sent.headers["location"] == f"/v1/jobs/{accepted.job.id}"
        assert accepted.documents[0].outcome == "created"
        job = reply(http.get(sent.headers["location"], params={"wait": 60}), 200, Job)
        assert job.status == "succeeded"
        assert job.counts.chunks == 1
        for key in (accepted.documents[0].id, "a/b.txt", "a%2Fb.txt"):
            found = reply(http.get(f"{documents}/{key}"), 200, Document)
            assert (found.status, found.external_id, found.title) == ("ready", "a/b.txt", "Port")

    def test_wait_by_parameter_and_by_header(self, http: httpx2.Client, documents: str) -> None:
        waited = http.post(documents, json={"text": TEXT}, params={"wait": 60})
        assert reply(waited, 200, Accepted).documents[0].status == "ready"
        preferred = http.post(documents, json={"text": TEXT + " More."}, headers={"Prefer": "wait=60"})
        assert reply(preferred, 200, Accepted).documents[0].status == "ready"

    def test_unchanged_costs_nothing(self, http: httpx2.Client, documents: str) -> None:
        for expected in ("created", "unchanged"):
            sent = http.post(documents, json={"text": TEXT, "external_id": "k"}, params={"wait": 60})
            accepted = reply(sent, 200, Accepted)
            assert accepted.documents[0].outcome == expected
        assert accepted.job is None
        assert "location" not in sent.headers

    def test_upsert_by_key(self, http: httpx2.Client, documents: str) -> None:
        path = f"{documents}/notes%2F2024%2Fjan.md"
        first = reply(http.put(path, json={"text": TEXT}, params={"wait": 60}), 200, Accepted)
        second = reply(http.put(path, json={"text": TEXT + " Later."}, params={"wait": 60}), 200, Accepted)
        assert [first.documents[0].outcome, second.documents[0].outcome] == ["created", "updated"]
        assert first.documents[0].id == second.documents[0].id
        assert second.documents[0].external_id == "notes/2024/jan.md"
        problem(http.put(path, json={"text": TEXT, "external_id": "x"}), 400, "bad_request")

    def test_files(self, http: httpx2.Client, documents: str) -> None:
        files = [
            ("file", ("one.txt", b"First file. It is short.", "text/plain")),
            ("file", ("two ü.md", b"# Second\n\nFile with a heading.", "text/markdown")),
        ]
        form = {"metadata": ['{"n": 1}', '{"n": 2}'], "external_id": ["x1", "x2"], "title": ["One", "Two"]}
        sent = http.post(documents, files=files, data=form, params={"wait": 60})
        accepted = reply(sent, 200, Accepted)
        assert [entry.external_id for entry in accepted.documents] == ["x1", "x2"]
        listed = reply(http.get(documents), 200, Page[Document])
        assert [(entry.title, entry.metadata) for entry in listed.data] == [
            ("One", {"n": 1}),
            ("Two", {"n": 2}),
        ]

    def test_list_by_status_and_filter(self, http: httpx2.Client, documents: str) -> None:
        for year in (2023, 2024):
            body = {"text": f"Report of {year}.", "metadata": {"year": year}}
            assert http.post(documents, json=body, params={"wait": 60}).status_code == 200

        def years(**params: str) -> list[Any]:
            page = reply(http.get(documents, params=params), 200, Page[Document])
            return [entry.metadata["year"] for entry in page.data]

        assert years(status="ready") == [2023, 2024]
        assert years(status="failed") == []
        assert years(filter='{"year": 2024}') == [2024]
        assert years(filter=json.dumps({"type": "lt", "key": "year", "value": 2024})) == [2023]
        problem(http.get(documents, params={"filter": "{"}), 400, "bad_request")
        problem(http.get(documents, params={"filter": '{"type": "eq"}'}), 400, "filter_invalid")
        problem(http.get(documents, params={"status": "lost"}), 400, "bad_request")

    def test_delete(self, http: httpx2.Client, documents: str) -> None:
        assert http.put(f"{documents}/gone", json={"text": TEXT}, params={"wait": 60}).status_code == 200
        assert http.delete(f"{documents}/gone").status_code == 204
        problem(http.get(f"{documents}/gone"), 404, "document_not_found")
        problem(http.delete(f"{documents}/gone"), 404, "document_not_found")

    def test_problems(self, http: httpx2.Client, documents: str) -> None:
        problem(http.post(documents, json={"text": "  \n"}), 422, "empty_document")
        problem(http.post(documents, json={"text": "a\0b"}), 422, "unprocessable_document")
        problem(http.post(documents, json={"txt": "a"}), 400, "bad_request")
        problem(http.post("/v1/collections/none/documents", json={"text": TEXT}), 404, "collection_not_found")
        problem(
            http.post(documents, content=b"text", headers={"Content-Type": "text/plain"}),
            415,
            "unsupported_media_type",
        )
        files = [("file", ("photo.png", b"\x89PNG\r\n\x1a\n\0\0", "image/png"))]
        refused = http.post(documents, files=files)
        assert refused.status_code in (415, 422), refused.text

    @pytest.mark.parametrize("wait", ["-1", "nan", "inf", "x"])
    def test_bad_waits(self, http: httpx2.Client, documents: str, wait: str) -> None:
        problem(http.post(documents, json={"text": TEXT}, params={"wait": wait}), 400, "bad_request")


class TestJobs:
    def test_list_and_get(self, http: httpx2.Client, lighthouse: str) -> None:
        params = {"collection": lighthouse, "status": "succeeded"}
        listed = reply(http.get("/v1/jobs", params=params), 200, Page[Job])
        assert len(listed.data) == 1
        assert reply(http.get(f"/v1/jobs/{listed.data[0].id}"), 200, Job) == listed.data[0]
        assert reply(http.get("/v1/jobs", params={**params, "status": "failed"}), 200, Page[Job]).data == []
        assert reply(http.get("/v1/jobs", params={**params, "kind": "ingest"}), 200, Page[Job]) == listed
        assert reply(http.get("/v1/jobs", params={**params, "kind": "gc"}), 200, Page[Job]).data == []

    def test_problems(self, http: httpx2.Client) -> None:
        problem(http.get("/v1/jobs/job_none"), 404, "job_not_found")
        problem(http.get("/v1/jobs/a%00b"), 400, "bad_request")
        problem(http.get("/v1/jobs", params={"status": "lost"}), 400, "bad_request")
        problem(http.get("/v1/jobs", params={"kind": "a kind"}), 400, "bad_request")


class TestQueries:
    def test_search(self, http: httpx2.Client, lighthouse: str) -> None:
        body = {"query": "Who kept the lighthouse?", "collection": lighthouse}
        found = reply(http.post("/v1/search", json=body), 200, SearchResponse)
        assert found.data[0].external_id == "port"
        assert "Amalia" in found.data[0].text
        for narrower in ({"filter": {"lang": "de"}}, {"min_score": 1.0}):
            assert reply(http.post("/v1/search", json={**body, **narrower}), 200, SearchResponse).data == []
        more = reply(http.post("/v1/search", json={**body, "top_k": 1000}), 200, SearchResponse)
        assert len(more.data) == 1

    def test_query(self, http: httpx2.Client, lighthouse: str) -> None:
        body = {
            "query": "Who kept the lighthouse?",
            "collection": lighthouse,
            "generation": {"max_tokens": 3},
        }
        answer = reply(http.post("/v1/query", json=body), 200, QueryResponse)
        assert answer.chunks[0].external_id == "port"
        assert answer.usage.completion_tokens == 3
        assert answer.usage.cached_tokens > 0
        off = reply(http.post("/v1/query", json={**body, "reuse": "off"}), 200, QueryResponse)
        assert off.answer == answer.answer
        assert off.usage.cached_tokens == 0

    def test_a_conversation(self, http: httpx2.Client, documents: str, collection: str) -> None:
        for number, text in enumerate((TEXT, f"The harbour of {collection} froze.")):
            sent = http.put(f"{documents}/{number}", json={"text": text}, params={"wait": 60})
            assert sent.status_code in (200, 201)
        body = {"collection": collection, "policy": "exact", "generation": {"max_tokens": 20}}
        messages: list[dict[str, Any]] = []
        prefilled, kept = [], 0
        for question in ("Who kept the lighthouse?", "When was it built?", "When did the harbour freeze?"):
            asked = {**body, "messages": [*messages, {"role": "user", "content": question}]}
            answer = reply(http.post("/v1/query", json=asked), 200, QueryResponse)
            off = reply(http.post("/v1/query", json={**asked, "reuse": "off"}), 200, QueryResponse)
            assert off.answer == answer.answer
            assert answer.usage.cached_tokens >= kept
            kept = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
            prefilled.append(answer.usage.prefilled_tokens)
            chunk_ids = [chunk.chunk_id for chunk in answer.chunks]
            assert len(chunk_ids) == (0 if messages else 2)
            messages += [
                {"role": "user", "content": question, "chunk_ids": chunk_ids},
                {"role": "assistant", "content": answer.answer},
            ]
        assert max(prefilled[1:]) < prefilled[0]
        asked = {**body, "messages": [*messages, {"role": "user", "content": "Why?"}]}
        assert http.delete(f"{documents}/1").status_code == 204
        gone = problem(http.post("/v1/query", json=asked), 404, "chunk_not_found")
        assert "chunk_ids" in gone.hint
        problem(http.post("/v1/query", json={**asked, "stream": True}), 404, "chunk_not_found")

    def test_another_question_over_the_same_chunks(
        self, http: httpx2.Client, documents: str, collection: str
    ) -> None:
        for number, text in enumerate((TEXT, f"The harbour of {collection} froze.")):
            http.put(f"{documents}/{number}", json={"text": text}, params={"wait": 60})
        body = {"collection": collection, "policy": "exact", "generation": {"max_tokens": 8}}
        answers = [
            reply(http.post("/v1/query", json={**body, "query": query}), 200, QueryResponse)
            for query in ("Who kept the lighthouse?", "Tell me: who kept the lighthouse?")
        ]
        first, second = ([chunk.chunk_id for chunk in answer.chunks] for answer in answers)
        assert first == second
        prefix = reply(http.get(f"/v1/collections/{collection}"), 200, Collection).prefix_tokens
        chunks = sum(chunk.tokens for chunk in answers[1].chunks)
        question = answers[1].usage.prompt_tokens - prefix - chunks
        assert answers[1].usage.prefilled_tokens <= question < answers[0].usage.prefilled_tokens

    @pytest.mark.parametrize("how", ["body", "header"])
    def test_query_as_events(self, http: httpx2.Client, lighthouse: str, how: str) -> None:
        body: dict[str, Any] = {"query": "Who kept it?", "collection": lighthouse}
        body["generation"] = {"max_tokens": 3}
        if how == "body":
            sent = http.post("/v1/query", json={**body, "stream": True})
        else:
            sent = http.post("/v1/query", json=body, headers={"Accept": "text/event-stream"})
        assert sent.headers["content-type"].startswith("text/event-stream")
        assert sent.headers["cache-control"] == "no-cache"
        assert sent.headers["x-accel-buffering"] == "no"
        frames = [
            dict(line.split(": ", 1) for line in frame.split("\n"))
            for frame in sent.text.strip().split("\n\n")
        ]
        assert [frame["id"] for frame in frames] == [str(number + 1) for number in range(len(frames))]
        events = [msgspec.json.decode(frame["data"], type=QueryEvent) for frame in frames]
        assert [json.loads(frame["data"])["type"] for frame in frames] == [frame["event"] for frame in frames]
        assert isinstance(events[0], QueryCreated)
        assert isinstance(events[-1], QueryCompleted)
        deltas = "".join(event.text for event in events if hasattr(event, "text"))
        assert deltas == events[-1].response.answer

    @pytest.mark.parametrize("route", ["/v1/search", "/v1/query"])
    def test_problems(self, http: httpx2.Client, lighthouse: str, route: str) -> None:
        body = {"query": "q", "collection": lighthouse}
        problem(http.post(route, json={**body, "collection": "none"}), 404, "collection_not_found")
        problem(http.post(route, json={**body, "collection": "no ne"}), 400, "bad_request")
        problem(http.post(route, json={**body, "query": ""}), 400, "bad_request")
        problem(http.post(route, json={**body, "top_k": 0}), 400, "bad_request")
        problem(http.post(route, json={**body, "topk": 1}), 400, "bad_request")
        problem(http.post(route, json={**body, "filter": {"type": "eq"}}), 400, "filter_invalid")

    def test_problems_of_a_query(self, http: httpx2.Client, lighthouse: str) -> None:
        body = {"query": "q", "collection": lighthouse}
        long = {**body, "query": "word " * 10_000}
        assert problem(http.post("/v1/query", json=long), 413, "context_too_long").hint
        assert problem(http.post("/v1/query", json={**long, "stream": True}), 413, "context_too_long")
        problem(http.post("/v1/query", json={**body, "policy": "guess"}), 400, "bad_request")
        message = {"role": "user", "content": "q"}
        problem(http.post("/v1/query", json={**body, "messages": [message]}), 400, "bad_request")
        problem(http.post("/v1/query", json={"collection": lighthouse}), 400, "bad_request")
        twice = {"collection": lighthouse, "messages": [message, message]}
        refused = problem(http.post("/v1/query", json=twice), 400, "bad_request")
        assert [item.loc for item in refused.errors] == ["messages[1].role"]
        problem(http.post("/v1/query", json={**body, "generation": {"seed": 2**63}}), 400, "bad_request")


def test_odd_files_are_accepted_or_refused(http: httpx2.Client, real_data: Path, collection: str) -> None:
    http.put(f"/v1/collections/{collection}", json={"prefill": "on_first_use"})
    path = f"/v1/collections/{collection}/documents"
    files = sorted((real_data / "odd_files").iterdir())
    outcomes = {}
    for file in files:
        sent = http.post(path, files=[("file", (file.name, file.read_bytes()))], timeout=10)
        outcomes[file.name] = sent.status_code
        assert sent.status_code in (200, 202, 415, 422), f"{file.name}: {sent.text}"
        if sent.status_code in (415, 422):
            assert sent.json()["hint"]
        as_json = http.post(path, content=file.read_bytes(), headers={"Content-Type": "application/json"})
        assert as_json.status_code == 400, file.name
    assert len(outcomes) >= 10
    assert outcomes["blns.txt"] in (200, 202)
    assert outcomes["droste.zip"] in (415, 422)
