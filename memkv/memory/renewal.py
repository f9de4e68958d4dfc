"""KV made again: what is missing of a collection, or all of one that another model made."""

from __future__ import annotations

from collections import Counter

import msgspec

from memkv.memory.collections import Collections
from memkv.memory.estimation import Estimation, TitledText
from memkv.memory.parts import Parts
from memkv.memory.replies import job_reply
from memkv.store.block_file import file_bytes
from memkv.store.rows import CollectionRow
from memkv.wire import CollectionCreate, StoreCollection, StoreWork

KIND = "reprefill"  # of the job that makes what is missing
_MOST_RESUMED = 100  # documents in one turn


def reprefill(parts: Parts, collections: Collections, request: StoreCollection, tenant: str) -> StoreWork:
    """See `Memory.reprefill`."""
    row = parts.store.catalog.get_collection(tenant, request.collection)
    if collections.is_stale(row):
        return _renew(parts, collections, row, request.dry_run)
    lacking = parts.store.catalog.documents_without_kv(tenant, row.id)
    layout = collections.layout(row.block_size)
    tokens = parts.store.catalog.tokens_without_kv(tenant, row.id)
    size = sum(file_bytes(layout, count) for count in tokens)
    before = parts.store.upkeep.disk_bytes()
    job = None
    if lacking and not request.dry_run:
        job = parts.store.jobs.create(tenant, row.id, KIND, lacking, arguments={"bytes_before": before})
    return StoreWork(
        dry_run=request.dry_run,
        files=len(tokens),
        tokens=sum(tokens),
        bytes=size,
        bytes_before=before,
        bytes_after=before + size,
        job=None if job is None else job_reply(job, row.name, ()),
    )


def _renew(parts: Parts, collections: Collections, row: CollectionRow, dry_run: bool) -> StoreWork:
    """Everything anew. The files that are to be made are as many as there were chunks, or nearly."""
    counts = parts.store.catalog.count_collection(row.tenant, row.id)
    size = counts.tokens * collections.layout(row.block_size).bytes_per_token
    before = parts.store.upkeep.disk_bytes()
    old = sum(file.num_bytes for file in parts.store.catalog.files_of(row.id))
    job = None
    if not dry_run:
        settings = {
            "name": row.name,
            "chunk_tokens": row.max_chunk_tokens,
            "block_size": row.block_size,
            "system_prompt": row.system_prompt,
            "primer": row.primer,
        }
        wanted = msgspec.convert(settings, CollectionCreate)
        renewed = parts.store.renew_collection(
            row, collections.new(wanted), arguments={"bytes_before": before}
        )
        collections.forget(row.id)
        parts.engine.drop(renewed.released.keys)
        job = renewed.job
    return StoreWork(
        dry_run=dry_run,
        files=counts.chunks,
        tokens=counts.tokens,
        bytes=size,
        bytes_before=before,
        bytes_after=before - old + size,
        job=None if job is None else job_reply(job, row.name, ()),
    )


def resume_starved(parts: Parts, collections: Collections, estimation: Estimation) -> None:
    """Queues documents again that failed for want of room, the shortest first, as far as there is some."""
    catalog = parts.store.catalog
    planned: Counter[str] = Counter()  # bytes by collection
    for document in sorted(catalog.starved_documents(), key=lambda row: row.text_bytes)[:_MOST_RESUMED]:
        row = catalog.collection_by_id(document.tenant, document.collection_id)
        if collections.is_stale(row):
            continue
        _, text = catalog.document_text(document.tenant, document.id)
        needed = estimation.needed_bytes(row, [TitledText(document.title, text)])
        if needed + planned.total() > estimation.room(row):
            break
        planned[row.id] += needed
        catalog.retry_documents([document])
    if planned:
        parts.store.jobs.announce()
