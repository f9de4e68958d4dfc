"""Threads that publish, load, heal and delete the same keys at once."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from store_samples import (
    damages,
    ingest,
    is_exact,
    load,
    new_collection,
    samples_of,
)

from memkv.errors import (
    MemKVError,
)
from memkv.store import DEFAULT_TENANT, Store

T = DEFAULT_TENANT


def test_threads_that_publish_load_damage_and_heal_one_key(plain_store: Store) -> None:
    store = plain_store
    samples = samples_of(store, "one key\nand two")
    stop = threading.Event()
    wrong: list[str] = []
    loaded = [0]

    def heal(seed: int) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            sample = dice.choice(samples)
            try:
                kv = load(store, sample.item)
            except MemKVError as error:
                wrong.append(repr(error))
                return
            if kv is None:
                store.chunks.publish([sample.item])
            elif bytes(kv.data) != bytes(sample.item.kv.data):
                wrong.append("other bytes")
            else:
                loaded[0] += 1

    threads = [threading.Thread(target=heal, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    dice = random.Random(9)
    for _ in range(60):
        for path in list((store.data_dir / "blocks").glob("*/*.kv")):
            try:
                if dice.random() < 0.5:
                    path.unlink()
                else:
                    data = bytearray(path.read_bytes())
                    data[dice.randrange(len(data))] ^= 1
                    replacement = store.data_dir / "replacement"
                    replacement.write_bytes(data)
                    replacement.rename(path)
            except FileNotFoundError:
                continue
        stop.wait(0.01)
    deadline = time.monotonic() + 30
    while not loaded[0] and not wrong and time.monotonic() < deadline:  # a slow machine heals slowly
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert loaded[0] > 0
    for sample in samples:
        if load(store, sample.item) is None:
            store.chunks.publish([sample.item])
        assert is_exact(store, sample)
    assert damages(store) == []
    assert list((store.data_dir / "tmp").iterdir()) == []


def test_deleting_while_the_same_text_is_ingested_leaves_no_row_without_its_file(store: Store) -> None:
    """Two collections share every key; one side deletes what the other side publishes."""
    first = store.catalog.create_collection(T, new_collection("first"))
    second = store.catalog.create_collection(T, new_collection("second"))
    text = "shared one\nshared two"
    failures: list[str] = []

    def churn(collection: Any) -> None:
        try:
            for _ in range(12):
                ingest(store, collection, text, external_id="e")
                store.delete_document(T, collection.id, "e")
        except MemKVError as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=churn, args=(collection,)) for collection in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert damages(store) == []
    ingest(store, first, text, external_id="e")
    assert all(is_exact(store, sample) for sample in samples_of(store, text))
