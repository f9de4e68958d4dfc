"""Collections, documents and tenants, on both databases."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from store_samples import (
    FINGERPRINT,
    PREFIX,
    commit,
    found_texts,
    ingest,
    kv_of,
    load,
    new_collection,
    samples_of,
)

from memkv.errors import (
    BadRequestError,
    CollectionExists,
    CollectionNotFound,
    DocumentNotFound,
    NotFoundError,
)
from memkv.kv.fingerprint import input_key
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.chunk_store import PublishItem
from memkv.store.rows import CollectionRow, NewDocument, PageRequest

T = DEFAULT_TENANT


def accept(store: Store, collection: CollectionRow, text: str, **fields: Any) -> Any:
    return store.accept_documents(collection.tenant, collection.id, [NewDocument(text, **fields)])


def test_collections_are_made_found_listed_and_deleted(store: Store) -> None:
    made = store.catalog.create_collection(T, new_collection("a", metadata={"k": [1, None]}, description="d"))
    assert store.catalog.get_collection(T, "a") == made
    assert store.catalog.collection_by_id(T, made.id) == made
    assert made.prefix_ids == PREFIX
    assert made.prefix_key == input_key(store.catalog.tenant_secret(T), FINGERPRINT, (), PREFIX)
    with pytest.raises(CollectionExists):
        store.catalog.create_collection(T, new_collection("a"))
    store.catalog.create_collection(T, new_collection("A"))
    with pytest.raises(CollectionNotFound) as caught:
        store.catalog.get_collection(T, "b")
    assert caught.value.hint
    store.delete_collection(T, "a")
    for gone in (
        lambda: store.catalog.get_collection(T, "a"),
        lambda: store.delete_collection(T, "a"),
        lambda: store.catalog.collection_by_id(T, made.id),
        lambda: accept(store, made, "x"),
    ):
        with pytest.raises(CollectionNotFound):
            gone()
    assert [row.name for row in store.catalog.list_collections(T, PageRequest()).rows] == ["A"]


def test_the_same_document_again_is_unchanged(store: Store, collection: CollectionRow) -> None:
    first = accept(store, collection, "text", external_id="e", title="t", metadata={"a": 1, "b": 2})
    again = accept(store, collection, "text", external_id="e", title="t", metadata={"b": 2, "a": 1})
    assert (first.documents[0].outcome, again.documents[0].outcome) == ("created", "unchanged")
    assert again.job is None
    assert again.documents[0].job_id == first.job.id, "the waiting job was not named"
    commit(store, first.documents[0].document, "text")
    store.jobs.finish(first.job.id, "succeeded")
    ready = accept(store, collection, "text", external_id="e", title="t", metadata={"b": 2, "a": 1})
    assert (ready.documents[0].outcome, ready.documents[0].job_id, ready.job) == ("unchanged", None, None)
    assert ready.documents[0].document.status == "ready"


def test_a_document_without_a_name_is_known_by_its_content(store: Store, collection: CollectionRow) -> None:
    first = accept(store, collection, "text", metadata={"a": 1}).documents[0]
    assert first.document.external_id == first.document.id
    assert accept(store, collection, "text", metadata={"a": 1}).documents[0].document.id == first.document.id
    by_id = accept(store, collection, "text", external_id=first.document.id, metadata={"a": 1}).documents[0]
    assert (by_id.outcome, by_id.document.id) == ("unchanged", first.document.id)
    others = [
        accept(store, collection, "text").documents[0],
        accept(store, collection, "text", metadata={"a": 1}, title="t").documents[0],
        accept(store, collection, "text", metadata={"a": 1}, external_id="named").documents[0],
        accept(store, collection, "other", metadata={"a": 1}).documents[0],
    ]
    assert [other.outcome for other in others] == ["created"] * 4
    with pytest.raises(BadRequestError):
        accept(store, collection, "x", external_id="doc_" + "0" * 32)


def test_many_clients_that_send_one_text_make_one_document(store: Store, collection: CollectionRow) -> None:
    outcomes: list[str] = []

    def send() -> None:
        outcomes.extend(accept(store, collection, "the same").documents[0].outcome for _ in range(4))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["created"] + ["unchanged"] * 31
    assert store.catalog.count_collection(T, collection.id).documents == 1


def test_only_metadata_changes_in_place(store: Store, collection: CollectionRow) -> None:
    ready = ingest(store, collection, "one\ntwo", external_id="e", metadata={"a": 1})
    changed = accept(store, collection, "one\ntwo", external_id="e", metadata={"a": 2})
    assert (changed.documents[0].outcome, changed.job) == ("updated", None)
    row = changed.documents[0].document
    assert (row.status, row.metadata, row.revision) == ("ready", {"a": 2}, ready.revision)


def test_an_update_keeps_the_old_chunks_searchable_until_it_is_committed(
    store: Store, collection: CollectionRow
) -> None:
    old = ingest(store, collection, "kept line\nold line", external_id="e")
    accepted = accept(store, collection, "kept line\nnew line", external_id="e")
    pending = accepted.documents[0].document
    assert (pending.id, pending.status, pending.revision) == (old.id, "pending", 2)
    assert sorted(found_texts(store, collection, "x")) == ["kept line", "old line"]
    [kept, gone] = samples_of(store, "kept line\nold line")
    committed = commit(store, pending, "kept line\nnew line")
    assert committed.change is not None
    assert [file.input_key for file in committed.change.released.files] == [gone.item.input_key]
    assert sorted(found_texts(store, collection, "x")) == ["kept line", "new line"]
    assert load(store, kept.item) is not None
    assert load(store, gone.item) is None
    assert store.verify(full=True) == [], "the file of the old line was not unlinked"
    row = store.catalog.get_document(T, collection.id, "e")
    assert (row.status, row.num_chunks, row.revision) == ("ready", 2, 2)


def test_a_commit_that_comes_too_late_writes_nothing(store: Store, collection: CollectionRow) -> None:
    first = accept(store, collection, "first", external_id="e").documents[0].document
    second = accept(store, collection, "second", external_id="e").documents[0].document
    assert commit(store, first, "first").outcome == "superseded"
    assert commit(store, second, "second").outcome == "ready"
    assert found_texts(store, collection, "x") == ["second"]
    store.delete_document(T, collection.id, "e")
    assert commit(store, second, "second").outcome == "deleted"
    assert found_texts(store, collection, "x") == []


def test_a_failed_document_stays_readable_and_is_taken_up_when_sent_again(
    store: Store, collection: CollectionRow
) -> None:
    ingest(store, collection, "old", external_id="e")
    accepted = accept(store, collection, "new", external_id="e")
    document = accepted.documents[0].document
    assert not store.catalog.fail_document(T, document.id, 1, {"code": "x"}), "an older revision failed"
    assert store.catalog.fail_document(T, document.id, 2, {"code": "x", "detail": "y"})
    store.jobs.finish(accepted.job.id, "failed", error={"code": "x"})
    row = store.catalog.get_document(T, collection.id, "e")
    assert (row.status, row.error) == ("failed", {"code": "x", "detail": "y"})
    assert found_texts(store, collection, "x") == ["old"]
    again = accept(store, collection, "new", external_id="e")
    assert (again.documents[0].outcome, again.documents[0].document.status) == ("updated", "pending")
    assert again.job is not None
    commit(store, again.documents[0].document, "new")
    row = store.catalog.get_document(T, collection.id, "e")
    assert (row.status, row.error) == ("ready", None)


def test_several_documents_are_accepted_with_one_job_or_not_at_all(
    store: Store, collection: CollectionRow
) -> None:
    texts = [
        NewDocument("a", external_id="1"),
        NewDocument("b", external_id="2"),
        NewDocument("a", external_id="1"),
    ]
    accepted = store.accept_documents(T, collection.id, texts)
    assert [one.outcome for one in accepted.documents] == ["created", "created", "unchanged"]
    assert accepted.job is not None
    assert {one.job_id for one in accepted.documents} == {accepted.job.id}
    assert accepted.job.total == 2
    items = store.jobs.items(T, accepted.job.id)
    assert [item.document_id for item in items] == [one.document.id for one in accepted.documents[:2]]
    with pytest.raises(BadRequestError):
        store.accept_documents(T, collection.id, [NewDocument("c"), NewDocument("d", title="\0")])
    assert store.catalog.count_collection(T, collection.id).documents == 2


def test_deleting_removes_what_nothing_else_refers_to(store: Store, collection: CollectionRow) -> None:
    prefix = PublishItem(collection.prefix_key, FINGERPRINT, (), PREFIX, kv_of(PREFIX))
    store.chunks.publish([prefix])
    second = store.catalog.create_collection(T, new_collection("second"))
    ingest(store, collection, "shared\nown", external_id="a")
    ingest(store, second, "shared", external_id="b")
    [shared, own] = samples_of(store, "shared\nown")
    change = store.delete_document(T, collection.id, "a")
    assert [file.input_key for file in change.released.files] == [own.item.input_key]
    assert load(store, own.item) is None
    assert load(store, shared.item) is not None
    assert load(store, prefix) is not None
    with pytest.raises(DocumentNotFound):
        store.delete_document(T, collection.id, "a")
    assert found_texts(store, collection, "x") == []
    assert found_texts(store, second, "x") == ["shared"]
    store.delete_collection(T, "papers")
    assert load(store, prefix) is not None, "the second collection has the same prefix"
    deleted = store.delete_collection(T, "second")
    assert (deleted.documents, deleted.chunks, deleted.kv_files) == (1, 1, 2)
    assert load(store, prefix) is None
    assert store.catalog.kv_totals() == (0, 0)
    assert store.verify(full=True) == []
    assert list((store.data_dir / "blocks").glob("*/*")) == []


def test_counts_are_those_of_the_collection(store: Store, collection: CollectionRow) -> None:
    second = store.catalog.create_collection(T, new_collection("second"))
    ingest(store, collection, "one\ntwo")
    ingest(store, second, "two\nthree", publish=False)
    accept(store, collection, "waiting")
    counts = store.catalog.count_collection(T, collection.id)
    assert (counts.ready, counts.pending, counts.failed, counts.documents) == (1, 1, 0, 2)
    assert (counts.chunks, counts.tokens, counts.kv_files) == (2, 6, 2)
    assert store.catalog.count_collection(T, second.id).kv_files == 1, "a shared key is KV of both"
    assert counts.kv_bytes == store.catalog.kv_totals()[1]
    totals = store.catalog.totals()
    assert (totals["collections"], totals["documents_ready"], totals["chunks"]) == (2, 2, 4)


def test_pages_walk_in_both_directions(store: Store, collection: CollectionRow) -> None:
    for number in range(7):
        accept(store, collection, f"text {number}", external_id=f"d{number}")

    def page(**request: Any) -> tuple[list[str], bool]:
        found = store.catalog.list_documents(T, collection.id, PageRequest(**request))
        return [row.external_id for row in found.rows], found.has_more

    everything = store.catalog.list_documents(T, collection.id, PageRequest(limit=100)).rows
    ids = [row.id for row in everything]
    names = [row.external_id for row in everything]
    assert ids == sorted(ids)
    assert page(limit=7) == (names, False)
    assert page(limit=3) == (names[:3], True)
    assert page(limit=3, after=ids[2]) == (names[3:6], True)
    assert page(limit=3, after=ids[5]) == (names[6:], False)
    assert page(limit=3, before=ids[5]) == (names[2:5], True)
    assert page(limit=3, before=ids[2]) == (names[:2], False)
    assert page(limit=3, order="desc") == (names[:3:-1], True)
    assert page(limit=3, order="desc", after=ids[4]) == (names[3:0:-1], True)
    assert page(limit=3, order="desc", before=ids[4]) == (names[6:4:-1], False)
    assert page(limit=2, order="desc", before=ids[0]) == (names[2:0:-1], True)
    assert page(limit=9, after=ids[0], before=ids[4]) == (names[1:4], False)
    assert page(after="zzz") == ([], False)
    for bad in ({"limit": 0}, {"limit": 101}, {"order": "up"}):
        with pytest.raises(BadRequestError):
            page(**bad)
    with pytest.raises(BadRequestError):
        page(after="\0")


def test_documents_are_listed_by_status(store: Store, collection: CollectionRow) -> None:
    ready = ingest(store, collection, "a")
    waiting = accept(store, collection, "b").documents[0].document
    for status, expected in (("ready", [ready.id]), ("pending", [waiting.id]), ("failed", [])):
        page = store.catalog.list_documents(T, collection.id, PageRequest(), status=status)  # type: ignore[arg-type]
        assert [row.id for row in page.rows] == expected


def test_chunks_are_listed_with_their_tokens(store: Store, collection: CollectionRow) -> None:
    document = ingest(store, collection, "one\nthree")
    rows = store.catalog.list_chunks(T, collection.id, document.id, PageRequest()).rows
    assert sorted((row.ordinal, row.text, row.start, row.end) for row in rows) == [
        (0, "one", 0, 3),
        (1, "three", 4, 9),
    ]
    assert {row.token_ids for row in rows} == {tuple(b"one"), tuple(b"three")}


def test_no_tenant_sees_another_ones_data(store: Store, collection: CollectionRow) -> None:
    store.catalog.create_tenant("other")
    with pytest.raises(BadRequestError):
        store.catalog.create_tenant("other")
    assert store.catalog.tenant_secret("other") != store.catalog.tenant_secret(T)
    theirs = store.catalog.create_collection("other", new_collection())  # the same name
    mine = ingest(store, collection, "the same text", external_id="e")
    other = ingest(store, theirs, "the same text", external_id="e")
    assert mine.id != other.id
    mine_key, their_key = (samples_of(store, "the same text", tenant=t)[0].item for t in (T, "other"))
    assert mine_key.input_key != their_key.input_key
    assert store.catalog.existing_keys("other", [mine_key.input_key]) == set()
    assert store.catalog.file_for("other", mine_key.input_key) is None
    assert load(store, mine_key) is not None

    for foreign in (
        lambda: store.catalog.get_document("other", collection.id, mine.id),
        lambda: store.catalog.document_by_id("other", mine.id),
        lambda: store.catalog.document_text("other", mine.id),
        lambda: store.delete_document("other", collection.id, mine.id),
        lambda: store.catalog.collection_by_id("other", collection.id),
        lambda: store.accept_documents("other", collection.id, [NewDocument("x")]),
        lambda: store.catalog.create_collection("nobody", new_collection()),
        lambda: store.catalog.tenant_secret("nobody"),
    ):
        with pytest.raises(NotFoundError):
            foreign()
    accepted = accept(store, collection, "later")
    with pytest.raises(NotFoundError):
        store.jobs.get("other", accepted.job.id)
    assert store.jobs.items("other", accepted.job.id) == ()
    assert store.catalog.list_documents("other", collection.id, PageRequest()).rows == ()
    assert store.commit_document("other", mine.id, 1, []).outcome == "deleted"
    assert not store.catalog.fail_document("other", accepted.documents[0].document.id, 1, {})
    row_ids = list(range(1, 10))
    assert store.catalog.chunks_by_row_ids("other", collection.id, row_ids) == {}
    (chunk,) = store.catalog.list_chunks(T, collection.id, mine.id, PageRequest()).rows
    ids = [chunk.id, "chk_none"]
    assert store.catalog.chunks_by_ids("other", collection.id, ids) == {}
    assert store.catalog.chunks_by_ids(T, collection.id, ids)[chunk.id].chunk == chunk
    assert len(store.catalog.chunks_by_ids(T, collection.id, ids)) == 1
    assert store.catalog.vectors("other", collection.id) is None
    store.delete_collection("other", "papers")
    assert load(store, mine_key) is not None
    assert load(store, their_key) is None
    assert found_texts(store, collection, "x") == ["the same text"]
