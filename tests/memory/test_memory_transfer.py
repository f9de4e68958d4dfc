"""Collections from one store into another: the texts always, their KV where it is asked for."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memkv.errors import BadRequestError, CollectionNotFound, ConflictError, EmptyDocument
from memkv.memory import Memory
from memkv.memory.transfer import is_finite
from memkv.store.archive import ArchiveReader, ArchiveWriter
from memkv.wire import CollectionCreate, DocumentCreate, Generation, PageRequest, QueryRequest

OpenMemory = Callable[..., Memory]


def text(seed: str) -> str:
    return "\n\n".join(f"Entry {i} of {seed}: the gauge read {i * 37 % 100} on day {i}." for i in range(10))


def filled(memory: Memory) -> Memory:
    memory.create_collection(
        CollectionCreate(name="c", chunk_tokens=64, description="d", metadata={"a": 1}, system_prompt="Say.")
    )
    memory.ingest(
        "c",
        [
            DocumentCreate(text=text("one"), external_id="one", title="One", metadata={"lang": "en"}),
            DocumentCreate(text=text("two")),
        ],
        wait=60,
    )
    return memory


def answer(memory: Memory) -> tuple[str, int]:
    request = QueryRequest(
        query="What did the gauge read?", collection="c", policy="map", generation=Generation(max_tokens=4)
    )
    response = memory.query(request)
    return response.answer, response.reuse.healed_chunks


def other(open_memory: OpenMemory, tmp_path: Path, **flags: object) -> Memory:
    return open_memory(store__data_dir=str(tmp_path / "other"), **flags)


@pytest.mark.parametrize("with_kv", [False, True])
def test_a_collection_moves_to_another_store(open_memory: OpenMemory, tmp_path: Path, with_kv: bool) -> None:
    memory = filled(open_memory())
    before = answer(memory)
    done = memory.export(tmp_path / "a.tar", with_kv=with_kv)
    chunks = memory.get_collection("c").counts.chunks
    assert (done.documents, done.collections) == (2, ["c"])
    assert done.kv_files == (chunks + 1 if with_kv else 0)
    there = other(open_memory, tmp_path)
    plan = there.import_archive(tmp_path / "a.tar", dry_run=True)
    assert (plan.documents, plan.collections) == (2, ["c"])
    assert there.list_collections(PageRequest()).data == []
    came = there.import_archive(tmp_path / "a.tar", with_kv=with_kv)
    assert (came.documents, came.failed, came.kv_taken) == (2, 0, chunks + 1 if with_kv else 0)
    mine, theirs = memory.get_collection("c"), there.get_collection("c")
    for name in ("description", "metadata", "chunk_tokens", "system_prompt", "prefill", "fingerprint"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert (theirs.counts.chunks, theirs.counts.tokens) == (mine.counts.chunks, mine.counts.tokens)
    assert len(there.admin.files(PageRequest(limit=100)).data) == chunks + 1
    found = there.get_document("c", "one")
    assert (found.title, found.metadata, found.status) == ("One", {"lang": "en"}, "ready")
    jobs = [job.counts for job in there.list_jobs(PageRequest()).data]
    assert sum(c.chunks_prefilled for c in jobs) == (0 if with_kv else chunks)
    assert answer(there) == before
    keys = {file.key for file in memory.admin.files(PageRequest(limit=100)).data}
    assert keys.isdisjoint(file.key for file in there.admin.files(PageRequest(limit=100)).data)
    again = there.import_archive(tmp_path / "a.tar", with_kv=with_kv)
    assert again.failed == 0
    assert there.get_document("c", "one").id == found.id, "a second import makes no second document"
    assert there.verify_store().found == 0


def test_kv_of_another_model_is_not_taken(
    open_memory: OpenMemory, tmp_path: Path, tiny_model_dir: Callable[[str], Path]
) -> None:
    filled(open_memory()).export(tmp_path / "a.tar", with_kv=True)
    there = other(open_memory, tmp_path, model__model=str(tiny_model_dir("qwen3")))
    came = there.import_archive(tmp_path / "a.tar", with_kv=True)
    assert (came.failed, came.kv_taken) == (0, 0)
    assert there.get_document("c", "one").status == "ready"


def test_kv_that_is_no_number_or_of_other_tokens_is_not_taken(
    open_memory: OpenMemory, tmp_path: Path
) -> None:
    """Crafted members: what is taken was made of these very tokens, and is finite."""
    memory = filled(open_memory())
    memory.export(tmp_path / "a.tar", with_kv=True)
    with ArchiveReader(tmp_path / "a.tar") as archive, ArchiveWriter(tmp_path / "b.tar") as crafted:
        crafted.add("manifest.json", json.dumps(archive.manifest).encode())
        crafted.add("collections/0000.jsonl", archive.read("collections/0000.jsonl"))
        for name in archive.names("kv/"):
            data = bytearray(archive.read(name))
            data[-2:] = b"\x80\x7f"  # infinity
            crafted.add(name, data)
    there = other(open_memory, tmp_path)
    came = there.import_archive(tmp_path / "b.tar", with_kv=True)
    assert (came.failed, came.kv_taken) == (0, 0)
    assert there.verify_store().found == 0
    nothing, infinite = np.zeros(8, np.float32), np.full(8, np.inf, np.float32)
    assert is_finite(nothing.tobytes(), "float32")
    assert not is_finite(infinite.tobytes(), "float32")
    assert is_finite(nothing.tobytes(), "bfloat16")
    assert not is_finite(b"\0\0\xc0\xff", "bfloat16")


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"title":"no text"}', b'{"text":"a","path":"/etc"}', b'{"text":1}', b"\xff"]
)
def test_a_line_that_is_no_document_is_refused(open_memory: OpenMemory, tmp_path: Path, line: bytes) -> None:
    with ArchiveWriter(tmp_path / "a.tar") as crafted:
        manifest = {"format_version": 1, "collections": [{"name": "c"}]}
        crafted.add("manifest.json", json.dumps(manifest).encode())
        crafted.add("collections/0000.jsonl", line)
    with pytest.raises(BadRequestError, match="document 1 of collection 1"):
        open_memory().import_archive(tmp_path / "a.tar", dry_run=True)


@pytest.mark.parametrize("settings", [{"name": "../up"}, {"name": "c", "chunk_tokens": 1}, {"nam": "c"}, 7])
def test_settings_that_are_none_are_refused(
    open_memory: OpenMemory, tmp_path: Path, settings: object
) -> None:
    with ArchiveWriter(tmp_path / "a.tar") as crafted:
        crafted.add("manifest.json", json.dumps({"format_version": 1, "collections": [settings]}).encode())
        crafted.add("collections/0000.jsonl", b"")
    with pytest.raises(BadRequestError):
        open_memory().import_archive(tmp_path / "a.tar")


def test_a_text_that_ingest_refuses_is_refused_here_too(open_memory: OpenMemory, tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "a.tar") as crafted:
        manifest = {"format_version": 1, "collections": [{"name": "c"}]}
        crafted.add("manifest.json", json.dumps(manifest).encode())
        crafted.add("collections/0000.jsonl", b'{"text":" "}\n')
    with pytest.raises(EmptyDocument):
        open_memory().import_archive(tmp_path / "a.tar")


def test_a_collection_with_other_settings_is_left_alone(open_memory: OpenMemory, tmp_path: Path) -> None:
    memory = filled(open_memory())
    memory.export(tmp_path / "a.tar")
    there = other(open_memory, tmp_path)
    there.create_collection(CollectionCreate(name="c", chunk_tokens=32))
    with pytest.raises(ConflictError):
        there.import_archive(tmp_path / "a.tar")
    assert there.get_collection("c").counts.documents == 0
    with pytest.raises(CollectionNotFound):
        memory.export(tmp_path / "b.tar", ["nothing"])
    assert not (tmp_path / "b.tar").exists()
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert tar.getnames()[0] == "manifest.json"
