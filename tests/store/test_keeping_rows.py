"""What the catalog finds for whoever keeps a store: files by key, collection or use, and what lacks them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update
from store_samples import ingest, load, new_collection, path_of, samples_of, tokens_of

from memkv.errors import BadRequestError, DatabaseDamaged, NotFoundError
from memkv.kv.fingerprint import token_digest
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.block_file import token_digest_of
from memkv.store.rows import CollectionRow, PageRequest
from memkv.store.tables import KVFile, KVUse

T = DEFAULT_TENANT


def keys_of(store: Store, text: str) -> list[str]:
    return [sample.item.input_key for sample in samples_of(store, text)]


def test_a_keys_chunk_says_what_it_is_made_of(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "one\ntwo")
    [_, key] = keys_of(store, "one\ntwo")
    found = store.catalog.chunk_of_key(T, key)
    assert (found.collection_id, found.token_ids) == (collection.id, tokens_of("two"))
    with pytest.raises(NotFoundError):
        store.catalog.chunk_of_key(T, "0" * 64)
    store.catalog.create_tenant("other")
    with pytest.raises(NotFoundError):
        store.catalog.chunk_of_key("other", key)


def test_a_collections_files_are_those_that_it_needs(store: Store, collection: CollectionRow) -> None:
    """Whoever made them."""
    other = store.catalog.create_collection(T, new_collection("other"))
    ingest(store, collection, "shared\nmine")
    ingest(store, other, "shared\ntheirs")
    assert [row.input_key for row in store.catalog.files_of(other.id)] == sorted(
        keys_of(store, "shared\ntheirs")
    )


def test_documents_that_lack_kv_are_told_with_what_they_lack(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "whole")
    half = ingest(store, collection, "kept\ngone")
    none = ingest(store, collection, "never\nmade\nmade", publish=False)
    [_, gone] = samples_of(store, "kept\ngone")
    row = store.catalog.file_for(T, gone.item.input_key)
    assert row is not None
    store.chunks.evict([row])
    assert store.catalog.documents_without_kv(T, collection.id) == [half.id, none.id]
    found = store.catalog.tokens_without_kv(T, collection.id)
    assert sorted(found) == sorted(map(len, ("gone", "never", "made"))), "what is shared counts once"
    assert load(store, gone.item) is None


def test_what_was_used_most_comes_first(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "seldom\noften\nnever\ngone")
    seldom, often, _, gone = keys_of(store, "seldom\noften\nnever\ngone")
    store.catalog.add_uses({(T, seldom): 1, (T, often): 2, (T, gone): 9})
    store.catalog.add_uses({(T, often): 5})
    row = store.catalog.file_for(T, gone)
    assert row is not None
    store.chunks.evict([row])
    assert [row.input_key for row in store.catalog.most_used_files(10)] == [often, seldom]
    assert [row.input_key for row in store.catalog.most_used_files(1)] == [often]
    assert store.catalog.uses_of(often) == 7


def test_files_that_nothing_refers_to_are_listed_apart(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "needed")
    [sample] = samples_of(store, "left over")
    store.chunks.publish([sample.item])
    page = store.catalog.list_files(PageRequest(), unused=True)
    assert [found.file.input_key for found in page.rows] == [sample.item.input_key]
    assert len(store.catalog.list_files(PageRequest()).rows) == 2


def test_rows_from_the_future_are_counted(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "one\ntwo")
    minute = timedelta(minutes=1)
    assert store.catalog.rows_from_the_future(minute) == (0, None)
    late = datetime.now(UTC).replace(microsecond=0) + timedelta(days=400)
    later = late + timedelta(days=1)
    [key, _] = keys_of(store, "one\ntwo")
    store.catalog.add_uses({(T, key): 1})
    with store.database.write() as transaction:
        connection = transaction.connection
        connection.execute(update(KVFile).values(verified_at=late))
        connection.execute(update(KVUse).values(used_at=later))
    assert store.catalog.rows_from_the_future(minute) == (3, later)
    assert store.catalog.rows_from_the_future(timedelta(days=400, hours=1)) == (1, later)
    assert store.catalog.rows_from_the_future(timedelta(days=500)) == (0, None)


def test_a_key_cut_too_short_to_tell_is_refused(store: Store, collection: CollectionRow) -> None:
    lines = [f"line {number}" for number in range(2)]
    ingest(store, collection, "\n".join(lines))
    first, second = keys_of(store, "\n".join(lines))
    alike = first[:8] + second[8:]
    with store.database.write() as transaction:
        transaction.connection.execute(
            update(KVFile).where(KVFile.input_key == second).values(input_key=alike)
        )
    with pytest.raises(BadRequestError, match="several keys"):
        store.catalog.find_file(first[:8])
    assert store.catalog.find_file(first).file.input_key == first


def test_a_key_that_is_published_twice_at_once_is_added_once(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "text")
    [row] = store.catalog.files_of_all_tenants()
    assert store.catalog.register_files([row]) == []
    store.catalog.drop_files_of_all_tenants([row])
    assert store.catalog.register_files([row, row]) == [row]


def test_a_row_whose_name_would_leave_the_directory_is_damage(
    store: Store, collection: CollectionRow
) -> None:
    ingest(store, collection, "text")
    with store.database.write() as transaction:
        transaction.connection.execute(update(KVFile).values(file_digest="/../../../etc/passwd"))
    with pytest.raises(DatabaseDamaged):
        store.catalog.files_of_all_tenants()


def test_a_documents_vectors_come_with_their_spans(store: Store, collection: CollectionRow) -> None:
    document = ingest(store, collection, "one\nthree")
    spans, vectors = store.catalog.document_vectors(T, document.id)
    assert spans == [(0, 3), (4, 9)]
    expected = [sample.chunk.embedding for sample in samples_of(store, "one\nthree")]
    assert [row.tolist() for row in vectors] == [row.tolist() for row in expected]
    assert store.catalog.document_vectors(T, "doc_" + "0" * 32)[0] == []


def test_revisions_are_those_of_what_is_there(store: Store, collection: CollectionRow) -> None:
    one = ingest(store, collection, "one", external_id="a")
    two = ingest(store, collection, "two", external_id="b")
    again = ingest(store, collection, "two, again", external_id="b")
    assert again.id == two.id
    found = store.catalog.revisions(T, [one.id, two.id, "doc_" + "0" * 32])
    assert found == {one.id: one.revision, two.id: again.revision}
    assert again.revision > two.revision


def test_a_documents_chunks_come_in_order(store: Store, collection: CollectionRow) -> None:
    document = ingest(store, collection, "one\ntwo\nthree")
    chunks = store.catalog.chunks_of(T, document.id)
    assert [chunk.text for chunk in chunks] == ["one", "two", "three"]
    assert [chunk.token_ids for chunk in chunks] == [tokens_of(chunk.text) for chunk in chunks]


def test_files_are_listed_by_the_collection_that_they_were_made_for(
    store: Store, collection: CollectionRow
) -> None:
    ingest(store, collection, "text")
    row = store.catalog.list_files(PageRequest()).rows[0].file
    assert store.catalog.list_files(PageRequest(), collection_id=row.collection_id).rows
    assert not store.catalog.list_files(PageRequest(), collection_id="col_" + "0" * 32).rows


def test_a_tenants_name_is_given_once(store: Store) -> None:
    store.catalog.create_tenant("other")
    with pytest.raises(BadRequestError, match="exists"):
        store.catalog.create_tenant("other")
    assert store.catalog.tenants() == ["default", "other"]


def test_a_file_says_which_tokens_it_was_made_of(store: Store, collection: CollectionRow) -> None:
    ingest(store, collection, "text")
    [sample] = samples_of(store, "text")
    head = path_of(store, sample.item).read_bytes()[:4096]
    assert token_digest_of(head) == token_digest(sample.item.context_ids, sample.item.token_ids)


def test_a_text_that_is_not_utf8_is_damage_even_to_the_driver(store: Store) -> None:
    with pytest.raises(DatabaseDamaged, match="UTF-8"), store.database.read():
        b"\xff".decode()
