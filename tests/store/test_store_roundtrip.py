"""A document's way through the store, on both databases."""

from __future__ import annotations

from store_samples import OpenStore, found_texts, ingest, load, new_collection, samples_of

from memkv.store import DEFAULT_TENANT

TEXT = "the first line\nthe second line\na third one"


def test_a_document_is_found_loaded_and_survives_a_reopening(open_store: OpenStore) -> None:
    store = open_store()
    collection = store.catalog.create_collection(DEFAULT_TENANT, new_collection())
    document = ingest(store, collection, TEXT, title="A title", metadata={"lang": "en"})
    assert document.status == "ready"
    assert (document.num_chunks, document.num_tokens) == (3, len(TEXT) - 2)
    for _ in range(2):
        assert found_texts(store, collection, "a third one", k=1) == ["a third one"]
        for sample in samples_of(store, TEXT):
            kv = load(store, sample.item)
            assert kv is not None
            assert bytes(kv.data) == bytes(sample.item.kv.data)
        assert store.verify(full=True) == []
        store.close()
        store = open_store()
        assert (store.recovery.rows_dropped, store.recovery.orphans) == (0, 0)
    assert store.catalog.document_text(DEFAULT_TENANT, document.id) == (1, TEXT)
    assert store.indexes.stats()["loaded"] == 0
    found_texts(store, collection, "x")
    assert store.indexes.stats()["loaded"] == 1, "the saved index was made again instead of read"
