"""Caps: of the store, of a tenant, of a collection; never passed, whoever publishes at the same time."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
from store_samples import OpenStore, Sample, is_exact, new_collection, samples_of

from memkv.errors import InsufficientStorageError
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.block_file import file_bytes
from memkv.store.quota import Caps
from memkv.store.rows import CollectionRow

T = DEFAULT_TENANT
SIZE = 4096 + 2 * 1024  # of a file whose chunk fills two blocks


def of(store: Store, collection: CollectionRow, numbers: range) -> list[Sample]:
    """Chunks of one size, for a collection."""
    texts = "\n".join(f"chunk {number:04d}" for number in numbers)
    samples = samples_of(store, texts, tenant=collection.tenant)
    assert {file_bytes(s.item.kv.layout, s.item.kv.num_tokens) for s in samples} == {SIZE}
    return [replace(s, item=replace(s.item, collection_id=collection.id)) for s in samples]


def publish(store: Store, samples: list[Sample]) -> int:
    return store.chunks.publish([sample.item for sample in samples])


def test_a_store_takes_what_fits_and_nothing_more(open_store: OpenStore) -> None:
    store = open_store(caps=Caps(store=3 * SIZE))
    row = store.catalog.create_collection(T, new_collection())
    assert publish(store, of(store, row, range(2))) == 2
    with pytest.raises(InsufficientStorageError) as caught:
        publish(store, of(store, row, range(2, 4)))
    assert "the store holds 12,288 of at most 18,432" in caught.value.detail
    assert "store.max_kv_bytes" in caught.value.hint
    assert store.catalog.kv_bytes() == 2 * SIZE, "a part of the batch was kept"
    assert publish(store, of(store, row, range(3))) == 1, "what is there already takes no room"
    assert store.chunks.quota.room(T, row.id) == 0
    store.upkeep.evict(to_bytes=SIZE)
    assert store.chunks.quota.room(T, row.id) == 2 * SIZE
    assert publish(store, of(store, row, range(10, 12))) == 2


def test_a_tenant_is_capped_apart_from_the_others(open_store: OpenStore) -> None:
    store = open_store(caps=Caps(tenant=SIZE))
    store.catalog.create_tenant("other")
    rows = [store.catalog.create_collection(tenant, new_collection()) for tenant in (T, "other")]
    for row in rows:
        assert publish(store, of(store, row, range(1))) == 1
        with pytest.raises(InsufficientStorageError, match="the tenant holds"):
            publish(store, of(store, row, range(1, 2)))
    assert store.catalog.kv_bytes() == 2 * SIZE


def test_a_collection_is_capped_apart_from_the_others(open_store: OpenStore) -> None:
    store = open_store()
    small = store.catalog.create_collection(T, new_collection("small", max_kv_bytes=SIZE))
    large = store.catalog.create_collection(T, new_collection("large"))
    assert store.chunks.quota.room(T, large.id) == math.inf
    assert publish(store, of(store, small, range(1))) == 1
    with pytest.raises(InsufficientStorageError, match="the collection holds"):
        publish(store, of(store, small, range(1, 2)))
    assert publish(store, of(store, large, range(1, 9))) == 8
    store.catalog.update_collection(T, "small", max_kv_bytes=2 * SIZE)
    assert publish(store, of(store, small, range(20, 21))) == 1
    store.catalog.update_collection(T, "small", max_kv_bytes=0)
    assert publish(store, of(store, small, range(30, 40))) == 10


def test_threads_together_do_not_pass_a_cap(open_store: OpenStore) -> None:
    store = open_store(caps=Caps(store=10 * SIZE))
    row = store.catalog.create_collection(T, new_collection())
    refused: list[InsufficientStorageError] = []
    most = []

    def work(first: int) -> None:
        for number in range(first, first + 5):
            try:
                publish(store, of(store, row, range(number, number + 1)))
            except InsufficientStorageError as error:
                refused.append(error)
            most.append(store.catalog.kv_bytes())

    threads = [threading.Thread(target=work, args=(100 * index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == store.catalog.kv_bytes() == 10 * SIZE
    assert len(refused) == 15
    assert store.chunks.quota.room(T, row.id) == 0, "a claim was not given back"
    assert (
        sum(is_exact(store, s) for i in range(5) for s in of(store, row, range(100 * i, 100 * i + 5))) == 10
    )
