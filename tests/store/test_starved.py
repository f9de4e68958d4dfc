"""Documents that found no room, tried again when there is some."""

from __future__ import annotations

from store_samples import ingest, new_collection

from memkv.store import DEFAULT_TENANT, Store
from memkv.store.rows import CollectionRow, NewDocument

T = DEFAULT_TENANT
NO_ROOM = {"code": "insufficient_storage", "detail": "it does not fit"}


def failed(store: Store, collection: CollectionRow, text: str, problem: dict[str, object]) -> str:
    """A document whose job ended with `problem`; its id."""
    accepted = store.accept_documents(collection.tenant, collection.id, [NewDocument(text)])
    assert accepted.job is not None
    document = accepted.documents[0].document
    store.jobs.claim("w")
    store.catalog.fail_document(document.tenant, document.id, document.revision, problem)
    store.jobs.finish(accepted.job.id, "failed")
    return document.id


def test_only_what_found_no_room_is_found_in_order(store: Store, collection: CollectionRow) -> None:
    wanted = [failed(store, collection, f"text {number}", NO_ROOM) for number in range(3)]
    failed(store, collection, "broken", {"code": "internal_error", "detail": 'no "insufficient_storage"'})
    ingest(store, collection, "well")
    store.catalog.create_tenant("other")
    theirs = store.catalog.create_collection("other", new_collection())
    wanted.append(failed(store, theirs, "theirs", NO_ROOM))
    assert [row.id for row in store.catalog.starved_documents()] == wanted


def test_they_are_tried_again_in_one_job(store: Store, collection: CollectionRow) -> None:
    ids = [failed(store, collection, text, NO_ROOM) for text in ("one", "three")]
    store.catalog.retry_documents(store.catalog.starved_documents())
    assert store.catalog.starved_documents() == []
    job = store.jobs.claim("w")
    assert job is not None
    assert (job.kind, job.total, job.unit) == ("ingest", len("onethree"), "bytes")
    assert [item.document_id for item in store.jobs.items(T, job.id)] == ids
    assert {store.catalog.document_by_id(T, each).status for each in ids} == {"pending"}
    assert store.jobs.claim("w") is None


def test_what_changed_meanwhile_is_left_alone(store: Store, collection: CollectionRow) -> None:
    failed(store, collection, "goes", NO_ROOM)
    seen = store.catalog.starved_documents()
    store.delete_document(T, collection.id, seen[0].id)
    store.catalog.retry_documents(seen)
    assert store.jobs.claim("w") is None
