"""When a GPU searches, when the CPU does, and that nobody can tell from what is found. The GPU is made up."""

from __future__ import annotations

import threading
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import DIM, OpenStore, ingest, new_collection, vector_of
from test_vector_index import change, content, random_vectors

from memkv.store import DEFAULT_TENANT, gpu_search
from memkv.store.gpu_search import Gpu
from memkv.store.vector_index import VectorIndex


class FakeGpuIndex:
    """`faiss.GpuIndexFlatIP` as far as it is used; like it, for one thread at a time."""

    made: list[FakeGpuIndex]
    fails: str

    def __init__(self, resources: object, dim: int) -> None:
        self._flat = faiss.IndexFlatIP(dim)
        self._busy = threading.Lock()
        self.searches = self.copies = self.added = 0
        FakeGpuIndex.made.append(self)

    @property
    def ntotal(self) -> int:
        return int(self._flat.ntotal)

    def copyFrom(self, index: Any) -> None:  # noqa: N802
        if FakeGpuIndex.fails == "copyFrom":
            raise RuntimeError("Error in virtual void* faiss::gpu::StandardGpuResourcesImpl::allocMemory")
        self.copies += 1
        self._flat.reset()
        if index.ntotal:
            self._flat.add(index.reconstruct_n(0, index.ntotal))

    def add(self, vectors: np.ndarray) -> None:
        self.added += len(vectors)
        self._flat.add(vectors)

    def search(self, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        assert self._busy.acquire(blocking=False), "two searches at once on one GPU"
        try:
            if FakeGpuIndex.fails == "search":
                raise RuntimeError("out of memory")
            self.searches += 1
            assert k <= 2048
            return self._flat.search(query, k)
        finally:
            self._busy.release()


class FakeResources:
    def setTempMemory(self, num_bytes: int) -> None:  # noqa: N802
        assert 0 < num_bytes < 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU, for collections of 20 vectors or more."""
    FakeGpuIndex.made, FakeGpuIndex.fails = [], ""
    monkeypatch.setattr(gpu_search, "_FEWEST_VECTORS", 20)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "StandardGpuResources", FakeResources, raising=False)
    monkeypatch.setattr(faiss, "GpuIndexFlatIP", FakeGpuIndex, raising=False)


def gpu_searches() -> int:
    return sum(each.searches for each in FakeGpuIndex.made)


def index_of(count: int) -> VectorIndex:
    return VectorIndex(content(1, list(range(100, 100 + count))), DIM, Gpu())


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=10),
    k=st.integers(1, 60),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_found_is_the_same_after_any_adds_and_removals(
    steps: list[tuple[bool, int]], k: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    with_gpu, without = VectorIndex(content(0, []), DIM, Gpu()), VectorIndex(content(0, []), DIM, Gpu())
    without._gpu_copy._failed = True
    kept: list[int] = []
    for generation, (adds, count) in enumerate(steps, 1):
        removed = [] if adds else [kept.pop(random.integers(len(kept))) for _ in range(min(count, len(kept)))]
        added = list(range(1000 * generation, 1000 * generation + count)) if adds else []
        kept += added
        for index in (with_gpu, without):
            assert index.apply(change(generation, removed, added, seed + generation))
        before = gpu_searches()
        [vector] = random_vectors(seed, 1)
        found, expected = (index.search(vector, k) for index in (with_gpu, without))
        assert found.row_ids.tolist() == expected.row_ids.tolist()
        assert np.allclose(found.scores, expected.scores)
        assert gpu_searches() - before == (len(kept) >= 20)


def test_what_is_added_is_copied_alone_and_what_is_removed_costs_a_whole_copy() -> None:
    index = index_of(30)
    [vector] = random_vectors(5, 1)
    for _ in range(2):
        index.search(vector, 3)
    [copy] = FakeGpuIndex.made
    assert (copy.copies, copy.added) == (1, 0)
    index.apply(change(2, [], [500, 501]))
    index.search(vector, 3)
    assert (copy.copies, copy.added) == (1, 2)
    index.apply(change(3, [500], [502]))
    index.search(vector, 3)
    assert (copy.copies, copy.added) == (2, 2)
    index.replace(content(9, list(range(40)), seed=3))
    assert 100 not in index.search(vector, 40).row_ids
    assert (copy.copies, copy.searches) == (3, 5)


@pytest.mark.parametrize("reason", ["small", "filtered", "many", "no gpu", "built without"])
def test_what_a_gpu_is_not_for_goes_to_the_cpu(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "no gpu":
        monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    elif reason == "built without":
        monkeypatch.delattr(faiss, "StandardGpuResources")
    index = index_of(19 if reason == "small" else 3000)
    [vector] = random_vectors(5, 1)
    among = np.array([100, 101], np.int64) if reason == "filtered" else None
    k = 2100 if reason == "many" else 2
    assert len(index.search(vector, k, among=among).row_ids) == k
    assert gpu_searches() == 0
    assert FakeGpuIndex.made == []


@pytest.mark.parametrize("fails", ["copyFrom", "search"])
def test_a_gpu_that_fails_is_not_asked_again_and_the_cpu_answers(fails: str) -> None:
    index = index_of(30)
    [vector] = random_vectors(5, 1)
    FakeGpuIndex.fails = fails
    found = index.search(vector, 3)
    FakeGpuIndex.fails = ""
    assert found.row_ids.tolist() == index.search(vector, 3).row_ids.tolist()
    assert len(found.row_ids) == 3
    assert gpu_searches() == 0


def test_collections_and_threads_share_a_gpu_one_after_the_other() -> None:
    gpu = Gpu()
    indexes = [VectorIndex(content(1, list(range(200)), seed=seed), DIM, gpu) for seed in range(2)]
    failures: list[BaseException] = []

    def search(number: int) -> None:
        try:
            for vector in random_vectors(number, 40):
                indexes[number % 2].search(vector, 5)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=search, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert gpu_searches() == 6 * 40


def test_a_store_finds_by_gpu_what_it_holds_and_nothing_that_it_deleted(open_store: OpenStore) -> None:
    store = open_store()
    collection = store.catalog.create_collection(DEFAULT_TENANT, new_collection())
    texts = [f"note {number}" for number in range(25)]
    documents = [ingest(store, collection, text, external_id=text, publish=False) for text in texts]
    hits = store.search(collection, vector_of(texts[7]), 3)
    assert hits[0].chunk.text == texts[7]
    assert gpu_searches() == 1
    store.delete_document(DEFAULT_TENANT, collection.id, documents[7].id)
    hits = store.search(collection, vector_of(texts[7]), 25)
    assert texts[7] not in {hit.chunk.text for hit in hits} and len(hits) == 24
    assert gpu_searches() >= 2
