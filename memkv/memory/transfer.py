"""Collections out of a store and into another one.

An archive is trusted in nothing: its texts go through the whole ingest, and are cut and tokenised here. Their
vectors are taken where the same embedder made them (archived_vectors.py). KV is taken from it only where that
is asked for, and only for the very tokens that its texts gave here, behind the same prefix, of the same
fingerprint; that its values are the model's own is on the asker's word, and `memkv store verify --deep`
checks it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import memkv
from memkv.errors import BadRequestError, CollectionNotFound
from memkv.store import Store
from memkv.store.archive import FORMAT_VERSION, ArchiveReader, ArchiveWriter
from memkv.store.block_file import file_name
from memkv.store.durable_files import Damage, read_file
from memkv.store.rows import DEFAULT_TENANT, CollectionRow, DocumentRow, PageRequest
from memkv.wire import CollectionCreate, Exported, Metadata

_PAGE = 100
_SPOOL_BYTES = 8 << 20  # of documents, kept in memory before they go to a temporary file

Tell = Callable[[str, int, int], None]  # collection, documents so far and in all


class ArchivedDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str
    external_id: str | None = None  # none where its id was memkv's own
    title: str = ""
    metadata: Metadata = {}
    chunks: list[tuple[int, int]] = []  # spans of `text` that the archive has vectors of


def export_collections(
    store: Store, path: Path, names: Sequence[str], *, with_kv: bool, tell: Tell
) -> Exported:
    """Writes collections, or all, to a new file.

    Raises:
        CollectionNotFound, ConfigError, InsufficientStorageError: nothing is left at `path`.
    """
    rows = _chosen(store, names)
    total = sum(store.catalog.count_collection(row.tenant, row.id).documents for row in rows)
    documents = vectors = files = 0
    with ArchiveWriter(path) as archive:
        archive.add("manifest.json", msgspec.json.encode(_manifest(store, rows)))
        for number, row in enumerate(rows):
            written = _write_documents(store, archive, number, row, _beyond(documents, total, tell))
            documents, vectors = documents + written[0], vectors + written[1]
        if with_kv:
            files = _write_kv(store, archive, rows, lambda: tell("KV", documents, total))
    return Exported(
        path=str(path),
        collections=[row.name for row in rows],
        documents=documents,
        vectors=vectors,
        kv_files=files,
        bytes=path.stat().st_size,
    )


def plan_export(store: Store, path: Path, names: Sequence[str], *, with_kv: bool) -> Exported:
    """What `export_collections` would write; of the bytes only those of vectors and KV are told.

    Raises CollectionNotFound.
    """
    rows = _chosen(store, names)
    counts = [store.catalog.count_collection(row.tenant, row.id) for row in rows]
    files = [file for row in rows for file in store.catalog.files_of(row.id)] if with_kv else []
    kv_bytes = {file.input_key: file.num_bytes for file in files}
    vector_bytes = sum(each.chunks * row.dim * 4 for row, each in zip(rows, counts, strict=True))
    return Exported(
        path=str(path),
        collections=[row.name for row in rows],
        documents=sum(each.documents for each in counts),
        vectors=sum(each.chunks for each in counts),
        kv_files=len(kv_bytes),
        bytes=vector_bytes + sum(kv_bytes.values()),
        dry_run=True,
    )


def archived_collections(archive: ArchiveReader) -> list[CollectionCreate]:
    """Their settings, in order. Raises BadRequestError."""
    try:
        return msgspec.convert(archive.manifest.get("collections"), list[CollectionCreate])
    except msgspec.ValidationError as error:
        raise BadRequestError(
            f"the archive is refused: {error}", hint="export it again: memkv store export FILE"
        ) from error


def archived_documents(archive: ArchiveReader, number: int) -> Iterator[ArchivedDocument]:
    """The documents of one of its collections. Raises BadRequestError for a line that is none."""
    for at, line in enumerate(archive.lines(_member(number)), 1):
        try:
            yield msgspec.json.decode(line, type=ArchivedDocument)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise BadRequestError(
                f"the archive is refused: document {at} of collection {number + 1}: {error}",
                hint="export it again: memkv store export FILE",
            ) from error


def vectors_member(number: int) -> str:
    """The name of a collection's vectors."""
    return f"vectors/{number:04d}.f32"


def is_finite(data: memoryview | bytes | bytearray, dtype: str) -> bool:
    """Whether every number of some KV is one."""
    if dtype == "float32":
        return bool(np.isfinite(np.frombuffer(data, dtype=np.float32)).all())
    exponent = 0x7F80 if dtype == "bfloat16" else 0x7C00
    return not bool((np.frombuffer(data, dtype=np.uint16) & exponent == exponent).any())


def _chosen(store: Store, names: Sequence[str]) -> list[CollectionRow]:
    if names:
        return [store.catalog.get_collection(DEFAULT_TENANT, name) for name in dict.fromkeys(names)]
    rows = [row for row in store.catalog.all_collections() if row.tenant == DEFAULT_TENANT]
    if not rows:
        raise CollectionNotFound("there is no collection to export")
    return rows


def _manifest(store: Store, rows: Sequence[CollectionRow]) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "memkv": memkv.__version__,
        "store_id": store.store_id,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "collections": [
            {
                "name": row.name,
                "description": row.description,
                "metadata": dict(row.metadata),
                "chunk_tokens": row.max_chunk_tokens,
                "block_size": row.block_size,
                "prefill": row.prefill,
                "max_kv_bytes": row.max_kv_bytes,
                "system_prompt": row.system_prompt,
                "primer": row.primer,
            }
            for row in rows
        ],
        "embedders": [row.embedder_digest for row in rows],
    }


def _beyond(before: int, total: int, tell: Tell) -> Callable[[str, int], None]:
    """Tells of one collection's documents, so many behind those of others."""
    return lambda name, done: tell(name, before + done, total)


def _write_documents(
    store: Store,
    archive: ArchiveWriter,
    number: int,
    row: CollectionRow,
    tell: Callable[[str, int], None],
) -> tuple[int, int]:
    """Returns how many documents and how many vectors."""
    documents = vectors = 0
    with (
        tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool,
        tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as vector_spool,
    ):
        for document in _documents(store, row):
            _, text = store.catalog.document_text(row.tenant, document.id)
            spans: list[tuple[int, int]] = []
            if document.status == "ready":  # else its chunks are those of an earlier text
                spans, rows = store.catalog.document_vectors(row.tenant, document.id)
                vector_spool.write(rows.astype("<f4", copy=False).tobytes())
            archived = ArchivedDocument(
                text=text,
                external_id=None if document.external_id == document.id else document.external_id,
                title=document.title,
                metadata=dict(document.metadata),  # type: ignore[arg-type]  # as it was accepted
                chunks=spans,
            )
            spool.write(msgspec.json.encode(archived) + b"\n")
            documents += 1
            vectors += len(spans)
            tell(row.name, documents)
        for name, written in ((_member(number), spool), (vectors_member(number), vector_spool)):
            size = written.tell()
            written.seek(0)
            archive.add_file(name, written, size)
    return documents, vectors


def _documents(store: Store, row: CollectionRow) -> Iterator[DocumentRow]:
    after: str | None = None
    while True:
        page = store.catalog.list_documents(row.tenant, row.id, PageRequest(limit=_PAGE, after=after))
        yield from page.rows
        if not page.has_more:
            return
        after = page.rows[-1].id


def _write_kv(
    store: Store, archive: ArchiveWriter, rows: Sequence[CollectionRow], tell: Callable[[], None]
) -> int:
    """Only sound files: a damaged one is left out, its chunk is prefilled again where it is imported."""
    count = 0
    files = {file.input_key: file for row in rows for file in store.catalog.files_of(row.id)}
    for file in files.values():
        tell()
        if store.chunks.check(file, full=True) is None:
            data = read_file(store.chunks.path(file))
            if not isinstance(data, Damage):
                archive.add(f"kv/{file_name(file.input_key, file.file_digest)}", data)
                count += 1
    return count


def _member(number: int) -> str:
    return f"collections/{number:04d}.jsonl"
