"""Exact search, its file, and that index and SQL cannot drift apart."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import DIM, OpenStore, commit, found_texts, ingest, new_collection, vector_of

from memkv.errors import BadRequestError, FilterError
from memkv.store import DEFAULT_TENANT, Store, vector_index
from memkv.store.durable_files import Damage
from memkv.store.gpu_search import Gpu
from memkv.store.rows import Change, CollectionRow, NewDocument, Vectors
from memkv.store.vector_index import VectorIndex, decode_vectors, encode_vectors

T = DEFAULT_TENANT


def random_vectors(seed: int, count: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def content(generation: int, ids: list[int], seed: int = 0) -> Vectors:
    return Vectors(
        generation, generation.to_bytes(16, "big"), np.array(ids, np.int64), random_vectors(seed, len(ids))
    )


def change(generation: int, removed: list[int], added: list[int], seed: int = 0) -> Change:
    return Change(
        "col_x",
        generation,
        generation.to_bytes(16, "big"),
        np.array(removed, np.int64),
        np.array(added, np.int64),
        random_vectors(seed, len(added)),
        (),
    )


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=12),
    k=st.integers(1, 40),
    seed=st.integers(0, 10_000),
    some=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_search_equals_brute_force_after_any_adds_and_removals(
    steps: list[tuple[bool, int]], k: int, seed: int, some: bool
) -> None:
    index = VectorIndex(content(0, []), DIM, Gpu())
    kept: dict[int, np.ndarray] = {}
    dice = random.Random(seed)
    next_id = 1
    for generation, (adds, count) in enumerate(steps, start=1):
        removed = [] if adds else dice.sample(sorted(kept), min(count, len(kept)))
        added = list(range(next_id, next_id + count)) if adds else []
        next_id += len(added)
        done = change(generation, removed, added, seed + generation)
        for row_id in removed:
            del kept[row_id]
        kept.update(zip(added, done.vectors, strict=True))
        assert index.apply(done)
    assert len(index) == len(kept)
    query = random_vectors(seed, 1)[0]
    allowed = [row_id for row_id in sorted(kept) if not some or dice.random() < 0.5]
    among = np.array(allowed, np.int64) if some else None
    found = index.search(query, k, among=among)
    expected = sorted(((float(kept[row_id] @ query), row_id) for row_id in allowed), reverse=True)[:k]
    assert found.row_ids.tolist() == [row_id for _, row_id in expected]
    np.testing.assert_allclose(found.scores, [score for score, _ in expected], atol=1e-6)


def test_changes_are_followed_in_order_and_once() -> None:
    index = VectorIndex(content(3, [1, 2]), DIM, Gpu())
    assert index.apply(change(3, [], [9])), "a change the index already has"
    assert len(index) == 2
    assert not index.apply(change(5, [], [9])), "a change was skipped and nobody noticed"
    assert len(index) == 2
    assert index.apply(change(4, [1], [9, 10]))
    assert (len(index), index.generation) == (3, 4)
    index.replace(content(4, [77]))
    assert len(index) == 3, "an older content replaced a newer one"
    index.replace(content(6, [77]))
    assert (len(index), index.generation) == (1, 6)
    assert index.wait_for(6, 0)
    assert not index.wait_for(7, 0.01)


@pytest.fixture
def collection_row() -> CollectionRow:
    ids = "0123456789abcdef0123456789abcdef"
    blank: dict[str, Any] = dict.fromkeys(CollectionRow.__slots__, "")
    return CollectionRow(
        **{**blank, "id": f"col_{ids}", "dim": DIM, "generation": 7, "stamp": (7).to_bytes(16, "big")}
    )


STORE_ID = "ab" * 16


@pytest.fixture
def index_file(tmp_path: Path, collection_row: CollectionRow) -> Path:
    path = tmp_path / "index"
    path.write_bytes(b"".join(encode_vectors(content(7, [3, 1, 2]), STORE_ID, collection_row.id, DIM)))
    return path


def test_a_file_holds_ids_and_vectors(index_file: Path, collection_row: CollectionRow) -> None:
    found = decode_vectors(index_file, STORE_ID, collection_row)
    assert isinstance(found, Vectors)
    assert found.row_ids.tolist() == [3, 1, 2]
    np.testing.assert_array_equal(found.vectors, content(7, [3, 1, 2]).vectors)
    assert b"IxMp" not in index_file.read_bytes(), "FAISS' own format is never read"


def test_every_damage_to_a_file_is_detected(index_file: Path, collection_row: CollectionRow) -> None:
    data = index_file.read_bytes()
    tried = 0
    for bit in range(len(data) * 8):
        if bit >= 112 * 8 and bit % 11:  # every bit of the header, each eleventh of the payload
            continue
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        index_file.write_bytes(flipped)
        assert isinstance(decode_vectors(index_file, STORE_ID, collection_row), Damage), f"bit {bit}"
        tried += 1
    for cut in [*range(0, len(data), 3), len(data) - 1]:
        index_file.write_bytes(data[:cut])
        assert isinstance(decode_vectors(index_file, STORE_ID, collection_row), Damage), f"cut to {cut}"
    index_file.write_bytes(data + b"\0")
    assert isinstance(decode_vectors(index_file, STORE_ID, collection_row), Damage)
    assert tried > 950


def test_without_the_digest_damage_would_pass(
    index_file: Path, collection_row: CollectionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(index_file.read_bytes())
    stored = bytes(data[96:112])
    data[-3] ^= 64
    index_file.write_bytes(data)
    assert isinstance(decode_vectors(index_file, STORE_ID, collection_row), Damage)
    monkeypatch.setattr(vector_index, "_digest", lambda *parts: stored)
    assert isinstance(decode_vectors(index_file, STORE_ID, collection_row), Vectors)


@pytest.mark.parametrize(
    ("change_", "kind"),
    [
        ({"generation": 8}, "stale"),
        ({"stamp": bytes(16)}, "stale"),  # a database that was restored and went another way
        ({"id": "col_" + "f" * 32}, "header"),
        ({"dim": DIM * 2}, "header"),
    ],
)
def test_a_file_of_anything_else_is_refused(
    index_file: Path, collection_row: CollectionRow, change_: dict[str, Any], kind: str
) -> None:
    found = decode_vectors(index_file, STORE_ID, replace(collection_row, **change_))
    assert isinstance(found, Damage)
    assert found.kind == kind
    assert isinstance(decode_vectors(index_file, "cd" * 16, collection_row), Damage)


def filled(store: Store, count: int = 6) -> CollectionRow:
    collection = store.catalog.create_collection(T, new_collection())
    for number in range(count):
        ingest(store, collection, f"text {number}", external_id=f"d{number}", metadata={"n": number})
    return collection


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "old", "another store's", "directory"])
def test_a_bad_index_file_is_made_again_from_sql(tmp_path: Path, damage: str) -> None:
    with Store.open(tmp_path / "data") as store:
        collection = filled(store)
        expected = found_texts(store, collection, "text 3")
    path = tmp_path / "data" / "indexes" / f"{collection.id}.vectors"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[150] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-4])
    elif damage == "missing":
        path.unlink()
    elif damage == "directory":
        path.unlink()
        path.mkdir()
    elif damage == "old":
        with Store.open(tmp_path / "data") as store:
            ingest(store, collection, "newest")
            expected = found_texts(store, collection, "text 3")
        path.write_bytes(data)
    else:
        with Store.open(tmp_path / "other") as other:
            theirs = filled(other)
            found_texts(other, theirs, "x")
        path.write_bytes((tmp_path / "other" / "indexes" / f"{theirs.id}.vectors").read_bytes())
    with Store.open(tmp_path / "data") as store:
        problems = [problem.kind for problem in store.verify()]
        assert problems == ([] if damage in ("missing", "old") else ["index"])
        assert found_texts(store, collection, "text 3") == expected
        assert store.indexes.stats()["rebuilt"] == 1
        if damage != "directory":
            store.verify(repair=True)
            assert store.verify() == []


def test_a_write_to_one_collection_leaves_the_files_of_others_valid(open_store: OpenStore) -> None:
    store = open_store()
    first = filled(store)
    second = store.catalog.create_collection(T, new_collection("second"))
    ingest(store, second, "other")
    found_texts(store, first, "x")
    found_texts(store, second, "x")
    store.close()
    store = open_store()
    ingest(store, second, "more")  # its index is not even loaded
    assert sorted(found_texts(store, second, "x")) == ["more", "other"]
    assert store.indexes.stats() == {"open": 1, "vectors": 2, "loaded": 0, "rebuilt": 1}
    assert len(found_texts(store, first, "x")) == 6
    assert store.indexes.stats()["loaded"] == 1


def test_search_takes_filters_floors_and_any_k(store: Store) -> None:
    collection = filled(store, 12)
    fresh = store.catalog.get_collection(T, "papers")

    def search(text: str, k: int, **options: Any) -> list[tuple[str, float]]:
        return [(hit.chunk.text, hit.score) for hit in store.search(fresh, vector_of(text), k, **options)]

    everything = search("text 5", 100)
    assert len(everything) == 12
    assert everything[0] == ("text 5", pytest.approx(1.0, abs=1e-5))
    assert [score for _, score in everything] == sorted((score for _, score in everything), reverse=True)
    assert search("text 5", 3) == everything[:3]
    floor = everything[4][1]
    assert search("text 5", 100, min_score=floor) == everything[:5]
    narrow = search("text 5", 5, filter={"type": "gte", "key": "n", "value": 9})
    assert [text for text, _ in narrow] == [text for text, _ in everything if int(text[5:]) >= 9]
    assert search("text 5", 2, filter={"n": 3})[0][0] == "text 3"
    assert search("text 5", 2, filter={"n": "3"}) == []
    assert search("text 5", 2, filter={}) == everything[:2]
    hit = store.search(fresh, vector_of("text 5"), 1)[0]
    assert (hit.document.external_id, hit.document.metadata) == ("d5", {"n": 5})
    assert hit.chunk.document_id == hit.document.id
    with pytest.raises(FilterError):
        search("x", 1, filter={"type": "eq"})
    for k, vector in ((0, vector_of("x")), (1, vector_of("x")[:3]), (1, np.full(DIM, np.nan, np.float32))):
        with pytest.raises(BadRequestError):
            store.search(fresh, vector, k)
    empty = store.catalog.create_collection(T, new_collection("empty"))
    assert store.search(empty, vector_of("x"), 5) == []
    assert collection.id == fresh.id


def test_rows_deleted_behind_the_indexs_back_do_not_shorten_the_answer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection = filled(store, 10)
    found = found_texts(store, collection, "text 1")
    for text in found[:5]:
        store.catalog.delete_document(T, collection.id, f"d{text[5:]}")  # the index is not told
    index = store.indexes._indexes[collection.id]
    monkeypatch.setattr(store.indexes, "get", lambda _: index)
    hits = store.search(collection, vector_of("text 1"), 3)
    assert [hit.chunk.text for hit in hits] == found[5:8]


def test_an_index_that_missed_a_commit_catches_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    collection = filled(store, 3)
    assert len(store.indexes.get(collection)) == 3
    accepted = store.accept_documents(T, collection.id, [NewDocument("missed")])
    with monkeypatch.context() as patch:  # the process stopped between commit and index
        patch.setattr(store.indexes, "apply", lambda *_: None)
        commit(store, accepted.documents[0].document, "missed")
    monkeypatch.setattr(VectorIndex, "wait_for", lambda *_: False)
    assert found_texts(store, collection, "missed", k=1) == ["missed"]


def test_searches_while_documents_come_and_go_are_right(store: Store) -> None:
    """What stays is always found, what is not there never; in the end the index equals SQL."""
    collection = filled(store, 5)
    stop = threading.Event()
    wrong: list[str] = []

    def search() -> None:
        while not stop.is_set():
            texts = found_texts(store, collection, "text 2", k=200)
            if (
                texts[0] != "text 2"
                or len(set(texts)) != len(texts)
                or not {f"text {n}" for n in range(5)} <= set(texts)
            ):
                wrong.append(str(texts))

    def churn(name: str) -> None:
        for step in range(10):
            ingest(store, collection, f"{name} {step}\n{name} more {step}", external_id=name)
            found = found_texts(store, collection, f"{name} {step}", k=1)
            if found != [f"{name} {step}"]:
                wrong.append(f"{name} {step} was ready and not found: {found}")
        store.delete_document(T, collection.id, name)
        if any(text.startswith(name) for text in found_texts(store, collection, name)):
            wrong.append(f"{name} was found after its deletion")

    searchers = [threading.Thread(target=search) for _ in range(2)]
    churners = [threading.Thread(target=churn, args=(name,)) for name in ("a", "b", "c")]
    for thread in (*searchers, *churners):
        thread.start()
    for thread in churners:
        thread.join()
    stop.set()
    for thread in searchers:
        thread.join()
    assert wrong == []
    fresh = store.catalog.get_collection(T, "papers")
    index, truth = store.indexes.get(fresh).content(), store.catalog.vectors(T, collection.id)
    assert truth is not None
    assert index.generation == truth.generation
    assert sorted(index.row_ids.tolist()) == truth.row_ids.tolist()


def test_a_deleted_collection_leaves_no_index_file(store: Store) -> None:
    collection = filled(store, 2)
    found_texts(store, collection, "x")
    store.indexes.save_all()
    assert len(list((store.data_dir / "indexes").iterdir())) == 1
    store.delete_collection(T, "papers")
    assert list((store.data_dir / "indexes").iterdir()) == []
    assert len(store.indexes.get(collection)) == 0
    assert not store.indexes.save(collection.id)
