"""An archive's collections made part of this memory, through the same ingest as everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from memkv.engine.residency import ChunkRef
from memkv.errors import ConflictError, MemKVError
from memkv.kv.fingerprint import token_digest
from memkv.memory.archived_vectors import ArchivedVectors
from memkv.memory.collections import Collections, OpenCollection
from memkv.memory.job_thread import JobCancelled
from memkv.memory.parts import Parts
from memkv.memory.transfer import (
    ArchivedDocument,
    Tell,
    archived_collections,
    archived_documents,
    is_finite,
)
from memkv.store.archive import ArchiveReader
from memkv.store.block_file import BlockFileIdentity, decode_block_file, parse_file_name, token_digest_of
from memkv.store.durable_files import Damage
from memkv.store.rows import DEFAULT_TENANT
from memkv.text.reader import accept_text
from memkv.wire import DocumentCreate, Imported, Job

if TYPE_CHECKING:
    from memkv.memory.memory import Memory

_BATCH = 64  # documents accepted together
_HEADER_BYTES = 4096


def import_archive(
    memory: Memory,
    parts: Parts,
    collections: Collections,
    path: Path,
    *,
    with_kv: bool,
    dry_run: bool,
    tell: Tell,
) -> Imported:
    """Every collection of an archive; one that exists takes the documents, if its settings are the same.

    Every document of it is looked at before the first one is taken. `tell` is asked several times a second
    while documents are made ready: what it raises ends the import, and doing it again goes on with it.

    Raises:
        BadRequestError: the archive is refused.
        ConflictError: a collection exists with other settings.
    """
    with ArchiveReader(path) as archive:
        wanted = archived_collections(archive)
        names = [settings.name for settings in wanted]
        total = sum(1 for number in range(len(wanted)) for _ in archived_documents(archive, number))
        before = parts.store.upkeep.disk_bytes()
        if dry_run:
            return Imported(
                collections=names, documents=total, bytes_before=before, bytes_after=before, dry_run=True
            )
        documents = failed = vectors_taken = kv_taken = 0
        kv = _by_tokens(archive) if with_kv else {}
        for number, settings in enumerate(wanted):
            memory.create_collection(settings, exist_ok=True)
            opened = collections.by_name(DEFAULT_TENANT, settings.name)
            vectors = ArchivedVectors(archive, number, parts.embedder)
            kv_taken += _take_kv(opened, archive, kv, [opened.prefix])
            for batch in _batches(archived_documents(archive, number)):
                refs = [ref for document in batch for ref in _refs(parts, opened, document)] if kv else []
                kv_taken += _take_kv(opened, archive, kv, refs)
                known = vectors.take(batch)
                parts.known_vectors.update(known)
                try:
                    accepted = memory.ingest(settings.name, [_created(document) for document in batch])
                    if accepted.job is not None:
                        again = _telling(tell, settings.name, documents, total)
                        _wait(memory, accepted.job.id, again)
                        vectors_taken += len(known) - len(parts.known_vectors)
                finally:  # nobody else's document is to have them
                    parts.known_vectors.clear()
                documents += len(batch)
                ids = [document.id for document in accepted.documents]
                failed += sum(memory.get_document(settings.name, i).status != "ready" for i in ids)
                tell(settings.name, documents, total)
        after = parts.store.upkeep.disk_bytes()
    return Imported(
        collections=names,
        documents=documents,
        failed=failed,
        vectors_taken=vectors_taken,
        kv_taken=kv_taken,
        bytes_before=before,
        bytes_after=after,
    )


def _wait(memory: Memory, job_id: str, tell: Callable[[Job], None]) -> None:
    """Until the job has ended. It is cancelled where the import is."""
    try:
        memory.wait_job(job_id, None, tell)
    except JobCancelled:
        with suppress(ConflictError):  # it ended a moment ago
            memory.cancel_job(job_id)
        raise


def _telling(tell: Tell, name: str, done: int, total: int) -> Callable[[Job], None]:
    """Says the same again and again while a job is waited for: `tell` may end it."""
    return lambda _: tell(name, done, total)


def _by_tokens(archive: ArchiveReader) -> dict[bytes, str]:
    """Members with KV by what they say they were made of."""
    return {token_digest_of(archive.head(name, _HEADER_BYTES)): name for name in archive.names("kv/")}


def _take_kv(
    opened: OpenCollection, archive: ArchiveReader, kv: dict[bytes, str], refs: Sequence[ChunkRef]
) -> int:
    """Publishes KV for these chunks, under this store's own keys; returns for how many it was there."""
    taken = 0
    for ref in refs:
        digest = token_digest(ref.context_ids, ref.token_ids)
        name = kv.get(digest)
        names = parse_file_name(name.removeprefix("kv/")) if name else None
        if name is None or names is None:
            continue
        identity = BlockFileIdentity(
            input_key=names[0],
            fingerprint_digest=opened.row.fingerprint_digest,
            token_digest=digest,
            layout=opened.layout,
            context_tokens=len(ref.context_ids),
            num_tokens=len(ref.token_ids),
        )
        found = decode_block_file(archive.read(name), identity, names[1])
        if isinstance(found, Damage) or not is_finite(found.data, opened.layout.dtype):
            continue  # it is prefilled here
        opened.kv.publish([(ref, found)])
        taken += 1
    return taken


def _refs(parts: Parts, opened: OpenCollection, document: ArchivedDocument) -> list[ChunkRef]:
    """The chunks that the ingest will cut; none of a text that it will refuse."""
    try:
        source = accept_text(document.text, max_bytes=parts.config.ingest.max_document_bytes)
        cut = parts.cutter.cut(source.text, document.title, opened.row.max_chunk_tokens)
    except MemKVError:
        return []
    return [opened.ref(opened.key(chunk.token_ids), chunk.token_ids) for chunk in cut]


def _created(found: ArchivedDocument) -> DocumentCreate:
    return DocumentCreate(
        text=found.text, external_id=found.external_id, title=found.title, metadata=found.metadata
    )


def _batches(documents: Iterator[ArchivedDocument]) -> Iterator[list[ArchivedDocument]]:
    while batch := list(islice(documents, _BATCH)):
        yield batch
