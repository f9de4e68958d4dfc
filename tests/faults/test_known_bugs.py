"""Bugs that users of other systems reported: each has a test here that would fail if memkv had it.

The numbers are of issues: LMCache, SGLang, vLLM, llama.cpp, Mooncake, Chroma, Qdrant, etcd, faiss, restic.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fault_life import NAME, check_answer, end, replace_bytes
from fault_model import document_text, fake_models, fault_config, notes_of, question_for
from small_disk import fill, resize, small_disk, used

from memkv.errors import (
    ContextTooLong,
    FingerprintMismatch,
    InsufficientStorageError,
    ServiceUnavailableError,
    StoreLocked,
)
from memkv.kv.fingerprint import Fingerprint
from memkv.memory import Memory, collections
from memkv.store import block_directory, durable_files
from memkv.store.rows import KVFileRow
from memkv.wire import CollectionCreate, DocumentCreate, Generation, QueryRequest, StoreGC

__all__ = ["small_disk"]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def memory(data_dir: Path) -> Iterator[Memory]:
    with fake_models(), Memory.open(fault_config(str(data_dir))) as memory:
        memory.create_collection(CollectionCreate(name=NAME))
        yield memory


def ingest(memory: Memory, name: str, notes: list[int]) -> str:
    """The document's status once its job has ended."""
    document = DocumentCreate(text=document_text(notes), external_id=name)
    return memory.ingest(NAME, [document], wait=60).documents[0].status


def rows_of(memory: Memory, name: str) -> list[KVFileRow]:
    """The files of a document's chunks, in order."""
    store = memory._store
    collection = store.catalog.get_collection("default", NAME)
    document = store.catalog.get_document("default", collection.id, name)
    keys = [chunk.input_key for chunk in store.catalog.chunks_of("default", document.id)]
    return [row for key in keys if (row := store.catalog.file_for("default", key)) is not None]


def path_of(memory: Memory, row: KVFileRow) -> Path:
    return memory._store.chunks._directory.path(row)


def drop_resident(memory: Memory) -> None:
    memory._parts.engine.drop(row.input_key for row in memory._store.catalog.files_of_all_tenants())


def ask(memory: Memory, note: int, **options: object) -> tuple[list[int], int]:
    """The notes of the answer, and how many chunks were healed for it."""
    request = QueryRequest(query=question_for(note), collection=NAME, policy="map", top_k=1, **options)  # type: ignore[arg-type]
    response = memory.query(request)
    return notes_of(response.answer), response.reuse.healed_chunks


def test_lmcache_4385_another_requests_file_is_not_served(memory: Memory) -> None:
    ingest(memory, "mine", [1])
    ingest(memory, "theirs", [2])
    [mine], [theirs] = rows_of(memory, "mine"), rows_of(memory, "theirs")
    replace_bytes(path_of(memory, mine), path_of(memory, theirs).read_bytes())
    drop_resident(memory)
    assert ask(memory, 1) == ([1], 1)


def test_lmcache_4991_what_could_not_be_stored_is_not_found(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(durable_files.os, "fsync", failing)
        assert ingest(memory, "d", [1, 2]) == "failed"
        assert memory._store.catalog.files_of_all_tenants() == []
    assert list((memory._store.data_dir / "blocks").glob("*/*.kv")) == []
    assert list((memory._store.data_dir / "tmp").iterdir()) == []
    assert ingest(memory, "d", [1, 2]) == "ready"
    assert ask(memory, 1)[0] == [1]


def test_sglang_24758_another_model_of_the_same_name_gets_nothing(data_dir: Path) -> None:
    with fake_models(), Memory.open(fault_config(str(data_dir))) as memory:
        memory.create_collection(CollectionCreate(name=NAME))
        ingest(memory, "d", [1])
    with fake_models("finetuned"), Memory.open(fault_config(str(data_dir))) as memory:
        assert memory.info().model.name == "fake"
        with pytest.raises(FingerprintMismatch, match="weights_digest"):
            ask(memory, 1)
        assert memory.store_stats().stale == [NAME]


@pytest.mark.parametrize(
    "field", [pytest.param("rope", id="vllm_56311_rope"), pytest.param("kv_dtype", id="sglang_33268_dtype")]
)
def test_a_setting_of_the_same_checkpoint_changes_every_key(
    field: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_models(), Memory.open(fault_config(str(data_dir))) as memory:
        memory.create_collection(CollectionCreate(name=NAME))
        ingest(memory, "d", [1])
        before = {row.input_key for row in memory._store.catalog.files_of_all_tenants()}
    plain = collections.fingerprint_of

    def changed(*arguments: object) -> Fingerprint:
        return replace(plain(*arguments), **{field: "another"})  # type: ignore[arg-type]

    monkeypatch.setattr(collections, "fingerprint_of", changed)
    with fake_models(), Memory.open(fault_config(str(data_dir))) as memory:
        with pytest.raises(FingerprintMismatch, match=field):
            ask(memory, 1)
        memory.create_collection(CollectionCreate(name="new"))
        memory.ingest("new", [DocumentCreate(text=document_text([1]), external_id="d")], wait=60)
        after = {row.input_key for row in memory._store.catalog.files_of_all_tenants()} - before
        assert len(after) == len(before)


def test_llama_27068_a_rejected_file_leaves_nothing_in_the_pool(memory: Memory) -> None:
    ingest(memory, "bad", [1])
    ingest(memory, "good", [2])
    [row] = rows_of(memory, "bad")
    path = path_of(memory, row)
    replace_bytes(path, path.read_bytes()[:-1] + b"\xff")
    drop_resident(memory)
    for _ in range(3):
        assert ask(memory, 1)[0] == [1]
        assert ask(memory, 2)[0] == [2]
    memory._parts.engine.check_integrity()
    pool = memory.store_stats().pool
    assert (pool["pinned"], pool["private"]) == (0, 0)


def test_vllm_54363_checksums_are_on_by_default(memory: Memory) -> None:
    ingest(memory, "d", [1])
    [row] = rows_of(memory, "d")
    path = path_of(memory, row)
    for at in range(0, len(path.read_bytes()), 997):
        data = bytearray(path_of(memory, row).read_bytes())
        data[at] ^= 0x80
        replace_bytes(path, data)
        drop_resident(memory)
        assert ask(memory, 1) == ([1], 1), f"byte {at} was believed"
        deadline = time.monotonic() + 10
        while not (healed := rows_of(memory, "d")):  # it is kept behind the answer
            assert time.monotonic() < deadline, "what was healed is not kept"
            time.sleep(0.002)
        [row] = healed


def test_vllm_57912_a_read_that_hangs_fails_its_question_alone(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fault_config(str(data_dir), **{"engine.queue_seconds": 1.0})
    with fake_models(), Memory.open(config) as memory:
        memory.create_collection(CollectionCreate(name=NAME))
        ingest(memory, "hung", [1])
        ingest(memory, "d", [2])
        hung = path_of(memory, rows_of(memory, "hung")[0]).stat().st_ino
        plain, go_on = durable_files._read_into, threading.Event()

        def slowly(fd: int, buffer: memoryview) -> int:
            if os.fstat(fd).st_ino == hung:
                go_on.wait(30)
            return plain(fd, buffer)

        drop_resident(memory)
        with monkeypatch.context() as slow:
            slow.setattr(durable_files, "_read_into", slowly)
            started = time.monotonic()
            with pytest.raises(ServiceUnavailableError, match="could not be read within 1 seconds"):
                ask(memory, 1)
            assert time.monotonic() - started < 10.0
            assert ask(memory, 2) == ([2], 0)
            go_on.set()
        assert ask(memory, 1) == ([1], 0)


def test_lmcache_1034_pins_are_released_whichever_way_a_question_ends(memory: Memory) -> None:
    ingest(memory, "d", [1, 2, 3])
    request = QueryRequest(query=question_for(1), collection=NAME, policy="map")
    with memory.query_stream(request) as stream:
        next(iter(stream))  # broken off before its first token
    with pytest.raises(ContextTooLong):
        ask(memory, 1, generation=Generation(max_tokens=4095))
    assert ask(memory, 1)[0] == [1]
    drop_resident(memory)
    for row in rows_of(memory, "d"):
        path_of(memory, row).unlink()
    assert ask(memory, 2)[0] == [2]
    memory._parts.engine.check_integrity()
    deadline = time.monotonic() + 5
    while any(memory.store_stats().pool[state] for state in ("pinned", "private")):
        assert time.monotonic() < deadline, "a pin was not released"
        time.sleep(0.01)


def test_vllm_35541_what_never_fits_is_refused_at_once(data_dir: Path) -> None:
    config = fault_config(str(data_dir), **{"engine.pool_bytes": 40 * 16 * 128})
    with fake_models(), Memory.open(config) as memory:
        memory.create_collection(CollectionCreate(name=NAME))
        ingest(memory, "d", [1])
        started = time.monotonic()
        with pytest.raises(ContextTooLong):
            ask(memory, 1, generation=Generation(max_tokens=1000))
        assert time.monotonic() - started < 1.0
        assert ask(memory, 1)[0] == [1]


def test_mooncake_850_a_reader_keeps_the_bytes_that_it_opened(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted and published again while a slow read goes on: never in place, so the read sees one file."""
    ingest(memory, "d", [1])
    drop_resident(memory)
    plain, reading, go_on = durable_files._read_into, threading.Event(), threading.Event()

    def slowly(fd: int, buffer: memoryview) -> int:
        reading.set()
        go_on.wait(10)
        return plain(fd, buffer)

    answers: list[tuple[list[int], int]] = []
    with monkeypatch.context() as slow:
        slow.setattr(durable_files, "_read_into", slowly)
        thread = threading.Thread(target=lambda: answers.append(ask(memory, 1)))
        thread.start()
        assert reading.wait(10)
        memory.forget(NAME, "d")
        go_on.set()
        thread.join(30)
    assert answers == [([1], 0)]
    assert ask(memory, 1)[0] == []


def test_chroma_6975_and_etcd_14370_an_acknowledged_document_survives_the_next_kill(data_dir: Path) -> None:
    """Killed the moment that the acknowledgement is said, long before the index is written."""
    code = (
        "import os, sys; sys.path[:0] = sys.argv[2:]\n"
        "from fault_model import *\nfrom fault_life import NAME\nfrom memkv.memory import Memory\n"
        "from memkv.wire import *\n"
        "with fake_models():\n"
        "    memory = Memory.open(fault_config(sys.argv[1]))\n"
        "    memory.create_collection(CollectionCreate(name=NAME))\n"
        "    memory.ingest(NAME, [DocumentCreate(text=document_text([1]), external_id='d')])\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    here = Path(__file__).parent
    places = [str(here), str(here.parent / "store"), str(here.parent)]
    done = subprocess.run([sys.executable, "-c", code, str(data_dir), *places], check=False, timeout=120)
    assert done.returncode == -9
    with fake_models(), Memory.open(fault_config(str(data_dir))) as memory:
        deadline = time.monotonic() + 30
        while memory.get_document(NAME, "d").status != "ready":
            assert time.monotonic() < deadline, "nobody went on with it"
            time.sleep(0.01)
        assert check_answer(memory, "d", 1) == []


def test_qdrant_2231_files_that_nobody_knows_never_stop_a_start(data_dir: Path) -> None:
    with fake_models(), Memory.open(fault_config(str(data_dir))) as memory:
        memory.create_collection(CollectionCreate(name=NAME))
        ingest(memory, "d", [1])
    for place in (".", "tmp", "blocks", "blocks/ab", "indexes", "quarantine"):
        (data_dir / place).mkdir(exist_ok=True)
        (data_dir / place / "left-over.tmp").write_bytes(b"\0" * 10)
    (data_dir / "tmp" / "directory").mkdir()
    with fake_models(), Memory.open(fault_config(str(data_dir))) as memory:
        assert ask(memory, 1)[0] == [1]


def test_faiss_1540_and_5400_an_index_file_is_never_mapped_and_never_faiss_own(memory: Memory) -> None:
    ingest(memory, "d", [1])
    store = memory._store
    collection = store.catalog.get_collection("default", NAME)
    assert ask(memory, 1)[0] == [1]
    store.indexes.save(collection.id)
    path = store.indexes._path(collection.id)
    assert path.read_bytes()[:8] == b"memkvVEC"
    path.write_bytes(b"IxFI" + os.urandom(500))  # what faiss would read
    store.indexes._indexes.clear()
    assert ask(memory, 1)[0] == [1]
    store.indexes.save(collection.id)
    os.truncate(path, 10)  # a mapped file would end the process here
    assert ask(memory, 1)[0] == [1]
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_restic_3486_gc_and_deletion_work_on_a_full_disk(small_disk: Path) -> None:
    with fake_models(), Memory.open(fault_config(str(small_disk / "data"))) as memory:
        memory.create_collection(CollectionCreate(name=NAME))
        ingest(memory, "kept", [1])
        ingest(memory, "gone", [2, 3, 4])
        resize(small_disk, used(small_disk))
        fill(small_disk, "filler")
        with suppress(InsufficientStorageError):
            ingest(memory, "new", list(range(100, 140)))
        fill(small_disk, "the rest")
        assert memory.verify_store(full=True).problems == []
        memory.forget(NAME, "gone")
        end(memory, memory.admin.gc(StoreGC(force=True)))
        assert ask(memory, 1)[0] == [1]
        assert memory.verify_store(full=True).problems == []


def test_restic_3486_a_lock_is_nobodys_to_break(memory: Memory, data_dir: Path) -> None:
    with pytest.raises(StoreLocked, match=str(os.getpid())):
        Memory.open(fault_config(str(data_dir)))
    (data_dir / "lock").write_text("")  # nothing in it counts
    with pytest.raises(StoreLocked):
        Memory.open(fault_config(str(data_dir)))


def test_libgit2_4123_a_name_is_durable_before_its_row(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename without an fsync of its directory may be undone by a power cut."""
    events: list[str] = []
    store = memory._store
    register, sync = store.catalog.register_files, block_directory.sync_directory

    def registering(files: list[KVFileRow]) -> list[KVFileRow]:
        events.append("row")
        return register(files)

    def syncing(path: Path) -> None:
        events.append("sync")
        sync(path)

    monkeypatch.setattr(store.catalog, "register_files", registering)
    monkeypatch.setattr(block_directory, "sync_directory", syncing)
    ingest(memory, "d", [1])
    assert "row" in events
    assert "sync" in events[: events.index("row")]
