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
    assert (done.vectors, done.kv_files) == (chunks, chunks + 1 if with_kv else 0)
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
        for name in ("collections/0000.jsonl", "vectors/0000.f32"):
            crafted.add(name, archive.read(name))
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


def test_vectors_are_taken_and_not_computed_again(
    open_memory: OpenMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is, to see whether they are the embedder's."""
    memory = filled(open_memory())
    chunks = memory.export(tmp_path / "a.tar").vectors
    there = other(open_memory, tmp_path)
    embedded = counted_texts(there, monkeypatch)
    came = there.import_archive(tmp_path / "a.tar")
    assert (came.failed, came.vectors_taken) == (0, chunks)
    assert len(embedded) == 1
    assert np.array_equal(vectors_in(there), vectors_in(memory)), "not the very same bits"
    assert there.import_archive(tmp_path / "a.tar").vectors_taken == 0, "nothing is to be done"


def test_an_import_that_is_ended_leaves_no_vectors_behind_and_goes_on(
    open_memory: OpenMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for the archive's own documents, and for nobody else's with the same text."""
    memory = filled(open_memory())
    memory.export(tmp_path / "a.tar")
    there = other(open_memory, tmp_path)

    def stop(*_: object) -> None:
        assert there._parts.known_vectors
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(there, "ingest", stop)
        with pytest.raises(InterruptedError):
            there.import_archive(tmp_path / "a.tar")
    assert there._parts.known_vectors == {}
    again = there.import_archive(tmp_path / "a.tar")
    assert (again.documents, again.failed) == (2, 0)


@pytest.mark.parametrize("damage", ["other embedder", "not finite", "not unit", "of other texts"])
def test_vectors_that_are_not_the_embedders_are_computed_here(
    open_memory: OpenMemory, tmp_path: Path, damage: str
) -> None:
    memory = filled(open_memory())
    memory.export(tmp_path / "a.tar")

    def crafted(manifest: dict[str, object], vectors: np.ndarray) -> np.ndarray:
        if damage == "other embedder":
            manifest["embedders"] = ["00" * 32]
        if damage == "not finite":
            vectors[:, 0] = np.inf
        if damage == "not unit":
            vectors *= 1.1
        return -vectors if damage == "of other texts" else vectors

    craft(tmp_path, crafted)
    there = other(open_memory, tmp_path)
    came = there.import_archive(tmp_path / "b.tar")
    assert (came.failed, came.vectors_taken) == (0, 0)
    assert np.allclose(vectors_in(there), vectors_in(memory), atol=1e-5)


def test_an_archive_with_too_few_vectors_is_refused(open_memory: OpenMemory, tmp_path: Path) -> None:
    filled(open_memory()).export(tmp_path / "a.tar")
    craft(tmp_path, lambda manifest, vectors: vectors[:-1])
    with pytest.raises(BadRequestError, match="fewer vectors"):
        other(open_memory, tmp_path).import_archive(tmp_path / "b.tar")


def test_an_archive_whose_embedders_are_no_names_is_refused(open_memory: OpenMemory, tmp_path: Path) -> None:
    filled(open_memory()).export(tmp_path / "a.tar")

    def numbers(manifest: dict[str, object], vectors: np.ndarray) -> np.ndarray:
        manifest["embedders"] = [7]
        return vectors

    craft(tmp_path, numbers)
    with pytest.raises(BadRequestError, match="refused"):
        other(open_memory, tmp_path).import_archive(tmp_path / "b.tar")


def test_a_document_that_is_not_ready_brings_no_vectors(open_memory: OpenMemory, tmp_path: Path) -> None:
    """Its chunks are those of an earlier text."""
    memory = filled(open_memory())
    memory._ingestion.stop()
    memory.ingest("c", [DocumentCreate(text=text("another one"), external_id="one")])
    chunks = memory.get_collection("c").counts.chunks
    assert 0 < memory.export(tmp_path / "a.tar").vectors < chunks
    came = other(open_memory, tmp_path).import_archive(tmp_path / "a.tar")
    assert came.failed == 0


def craft(tmp_path: Path, change: Callable[[dict[str, object], np.ndarray], np.ndarray]) -> None:
    """b.tar: a.tar with another manifest and other vectors."""
    with ArchiveReader(tmp_path / "a.tar") as archive, ArchiveWriter(tmp_path / "b.tar") as crafted:
        vectors = np.frombuffer(archive.read("vectors/0000.f32"), dtype="<f4").reshape(-1, 384).copy()
        manifest = dict(archive.manifest)
        vectors = change(manifest, vectors)
        crafted.add("manifest.json", json.dumps(manifest).encode())
        crafted.add("collections/0000.jsonl", archive.read("collections/0000.jsonl"))
        crafted.add("vectors/0000.f32", vectors.tobytes())


def counted_texts(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is embedded from now on."""
    seen: list[str] = []
    embed = memory._parts.embedder.embed

    def counting(texts: list[str]) -> np.ndarray:
        seen.extend(texts)
        return embed(texts)

    monkeypatch.setattr(memory._parts.embedder, "embed", counting)
    return seen


def vectors_in(memory: Memory) -> np.ndarray:
    """Of the chunks of document `one`, in order."""
    document = memory.get_document("c", "one")
    return memory._store.catalog.document_vectors("default", document.id)[1]


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
