"""Statements about documents: the truth that everything else is made from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, exists, insert, select, update

from memkv.errors import BadRequestError, CollectionNotFound, DocumentNotFound, UnprocessableDocumentError
from memkv.store.catalog_chunks import remove_chunks
from memkv.store.catalog_collections import advance_collection
from memkv.store.catalog_files import in_batches, release
from memkv.store.catalog_filters import filter_clause
from memkv.store.catalog_jobs import insert_job, live_job_of
from memkv.store.catalog_store import now
from memkv.store.filters import Filter, kind_of
from memkv.store.ids import ID_PATTERN, new_id
from memkv.store.paging import read_page
from memkv.store.plain_values import canonical_json, checked_metadata, checked_text
from memkv.store.rows import (
    Accepted,
    AcceptedDocument,
    Change,
    DocumentRow,
    DocumentStatus,
    NewDocument,
    Outcome,
    Page,
    PageRequest,
    Problem,
)
from memkv.store.statements import Statements
from memkv.store.tables import Collection, Document, DocumentValue, Job, JobDocument

MAX_TEXT_CHARS = 100_000_000
MAX_EXTERNAL_ID_CHARS = 512  # PostgreSQL indexes keys of up to 2,700 bytes

DOCUMENT_COLUMNS = (
    Document.id,
    Document.tenant,
    Document.collection_id,
    Document.external_id,
    Document.title,
    Document.filename,
    Document.media_type,
    Document.metadata_,
    Document.content_hash,
    Document.text_bytes,
    Document.status,
    Document.revision,
    Document.error,
    Document.num_chunks,
    Document.num_tokens,
    Document.created_at,
    Document.updated_at,
)


class DocumentStatements(Statements):
    def accept_documents(
        self, tenant: str, collection_id: str, documents: Sequence[NewDocument], *, kind: str = "ingest"
    ) -> Accepted:
        """Makes texts durable and queues one job for those that need work. All or none.

        A document is known by its `external_id`; without one, by its content among those that were given
        none. Known and equal (text, title, metadata): `unchanged`. Only metadata differs: changed in place,
        nothing to do. Text or title differ: pending again, its old chunks stay searchable until
        `commit_document`. A failed document that is sent again is queued again.

        Raises:
            CollectionNotFound: the collection is gone.
            BadRequestError, UnprocessableDocumentError: a value cannot be stored.
        """
        checked = [_checked(document) for document in documents]
        with self._database.write() as transaction:
            connection = transaction.connection
            known = select(Collection.id).where(Collection.tenant == tenant, Collection.id == collection_id)
            if connection.execute(known).scalar() is None:
                raise CollectionNotFound("the collection does not exist any more")
            results = [_accept(connection, tenant, collection_id, document) for document in checked]
            work = {row.id: row.text_bytes for row, _, needs_work in results if needs_work}
            job = None
            if work:
                total = sum(work.values())
                job = insert_job(
                    transaction, tenant, collection_id, kind, list(work), total=total, unit="bytes"
                )
            accepted = []
            for row, outcome, _ in results:
                job_id = None
                if row.status == "pending":
                    job_id = job.id if job and row.id in work else live_job_of(connection, row.id)
                accepted.append(AcceptedDocument(row, outcome, job_id))
        return Accepted(tuple(accepted), job)

    def get_document(self, tenant: str, collection_id: str, document: str) -> DocumentRow:
        """By id or external id. Raises DocumentNotFound."""
        with self._database.read() as connection:
            return _require(connection, tenant, collection_id, document)

    def document_by_id(self, tenant: str, document_id: str) -> DocumentRow:
        """For a job's worker, which knows no collection. Raises DocumentNotFound."""
        with self._database.read() as connection:
            row = connection.execute(
                select(*DOCUMENT_COLUMNS).where(Document.tenant == tenant, Document.id == document_id)
            ).first()
        if row is None:
            raise DocumentNotFound("the document does not exist any more")
        return document_row(row)

    def document_text(self, tenant: str, document_id: str) -> tuple[int, str]:
        """Revision and text of the newest revision. Raises DocumentNotFound."""
        with self._database.read() as connection:
            row = connection.execute(
                select(Document.revision, Document.text).where(
                    Document.tenant == tenant, Document.id == document_id
                )
            ).first()
        if row is None:
            raise DocumentNotFound("the document does not exist any more")
        return row.revision, row.text

    def revisions(self, tenant: str, document_ids: Sequence[str]) -> dict[str, int]:
        """The newest revision of each of these that is there."""
        found: dict[str, int] = {}
        with self._database.read() as connection:
            for batch in in_batches(document_ids):
                statement = select(Document.id, Document.revision).where(
                    Document.tenant == tenant, Document.id.in_(batch)
                )
                found.update({row.id: row.revision for row in connection.execute(statement)})
        return found

    def list_documents(
        self,
        tenant: str,
        collection_id: str,
        page: PageRequest,
        *,
        status: DocumentStatus | None = None,
        matching: Filter | None = None,
    ) -> Page[DocumentRow]:
        statement: Select[*tuple[Any, ...]] = select(*DOCUMENT_COLUMNS).where(
            Document.tenant == tenant, Document.collection_id == collection_id
        )
        if status is not None:
            statement = statement.where(Document.status == status)
        if matching is not None:
            statement = statement.where(filter_clause(matching, collection_id))
        with self._database.read() as connection:
            return read_page(connection, statement, page, order_by=Document.id, make=DocumentRow)

    def delete_document(self, tenant: str, collection_id: str, document: str) -> Change:
        """Removes a document, by id or external id, with its chunks. Raises DocumentNotFound."""
        with self._database.write() as transaction:
            connection = transaction.connection
            row = _require(connection, tenant, collection_id, document)
            removed = remove_chunks(connection, tenant, row.id)
            connection.execute(delete(Document).where(Document.tenant == tenant, Document.id == row.id))
            generation, stamp = advance_collection(connection, collection_id)
            released = release(connection, tenant, removed.keys)
        return Change.removal(collection_id, generation, stamp, removed.row_ids, released)

    def fail_document(self, tenant: str, document_id: str, revision: int, problem: Problem) -> bool:
        """Marks this revision as failed; false where the document is gone, newer or not pending."""
        with self._database.write() as transaction:
            changed = transaction.connection.execute(
                update(Document)
                .where(
                    Document.tenant == tenant,
                    Document.id == document_id,
                    Document.revision == revision,
                    Document.status == "pending",
                )
                .values(status="failed", error=dict(problem), updated_at=now())
            )
            return changed.rowcount > 0

    def pending_documents(self) -> list[DocumentRow]:
        """Pending documents of all tenants that no queued or running job speaks of. There should be none."""
        cared_for = (
            exists()
            .where(JobDocument.document_id == Document.id)
            .where(Job.id == JobDocument.job_id, Job.status.in_(("queued", "running")))
        )
        with self._database.read() as connection:
            rows = connection.execute(
                select(*DOCUMENT_COLUMNS)
                .where(Document.status == "pending", ~cared_for)
                .order_by(Document.id)
            )
            return [document_row(row) for row in rows]

    def queue_documents(self, documents: Sequence[DocumentRow], *, kind: str = "ingest") -> None:
        """One job per collection for documents that lost theirs."""
        by_collection: dict[tuple[str, str], dict[str, int]] = {}
        for document in documents:
            work = by_collection.setdefault((document.tenant, document.collection_id), {})
            work[document.id] = document.text_bytes
        with self._database.write() as transaction:
            for (tenant, collection_id), work in by_collection.items():
                total = sum(work.values())
                insert_job(transaction, tenant, collection_id, kind, list(work), total=total, unit="bytes")


@dataclass(frozen=True, slots=True)
class _Checked:
    """A new document whose every value both databases can hold."""

    new: NewDocument
    metadata: dict[str, object]
    metadata_json: str
    content_hash: str
    text_bytes: int


def document_row(row: Row[*tuple[Any, ...]]) -> DocumentRow:
    return DocumentRow(*row)


def _checked(new: NewDocument) -> _Checked:
    try:
        checked_text("the text", new.text, max_chars=MAX_TEXT_CHARS)
    except BadRequestError as error:
        raise UnprocessableDocumentError(error.detail, hint=error.hint) from error
    if new.external_id is not None:
        checked_text("external_id", new.external_id, max_chars=MAX_EXTERNAL_ID_CHARS)
        if not new.external_id.strip():
            raise BadRequestError("external_id is blank", hint="leave it out, or give the document a name")
    checked_text("the title", new.title, max_chars=2_000)
    checked_text("the file name", new.filename, max_chars=2_000)
    checked_text("the media type", new.media_type, max_chars=200)
    metadata = checked_metadata("metadata", new.metadata)
    data = new.text.encode()
    content_hash = hashlib.blake2b(data, digest_size=32).hexdigest()
    return _Checked(new, metadata, canonical_json(metadata), content_hash, len(data))


def _accept(
    connection: Connection, tenant: str, collection_id: str, checked: _Checked
) -> tuple[DocumentRow, Outcome, bool]:
    """The document as it now stands, what happened to it, and whether a job has to work on it."""
    known = _find_known(connection, tenant, collection_id, checked)
    if known is None:
        return _insert(connection, tenant, collection_id, checked), "created", True
    new = checked.new
    same_text = known.content_hash == checked.content_hash and known.title == new.title
    same_metadata = canonical_json(known.metadata) == checked.metadata_json
    if same_text and same_metadata and known.status != "failed":
        return known, "unchanged", False
    values: dict[str, object] = {
        "metadata_": checked.metadata,
        "filename": new.filename,
        "media_type": new.media_type,
        "updated_at": now(),
    }
    needs_work = not same_text or known.status == "failed"
    if needs_work:
        values.update(
            title=new.title,
            text=new.text,
            text_bytes=checked.text_bytes,
            content_hash=checked.content_hash,
            status="pending",
            revision=known.revision + 1,
            error=None,
        )
    connection.execute(update(Document).where(Document.id == known.id).values(**values))
    if not same_metadata:
        connection.execute(delete(DocumentValue).where(DocumentValue.document_id == known.id))
        _insert_values(connection, collection_id, known.id, checked.metadata)
    return _require(connection, tenant, collection_id, known.id), "updated", needs_work


def _find_known(
    connection: Connection, tenant: str, collection_id: str, checked: _Checked
) -> DocumentRow | None:
    statement = select(*DOCUMENT_COLUMNS).where(
        Document.tenant == tenant, Document.collection_id == collection_id
    )
    if checked.new.external_id is not None:
        row = connection.execute(statement.where(Document.external_id == checked.new.external_id)).first()
        if row is None and ID_PATTERN.match(checked.new.external_id):
            raise BadRequestError(
                "external_id looks like an id of memkv's, and there is no such document",
                hint="choose another external_id",
            )
        return None if row is None else document_row(row)
    unnamed = statement.where(
        Document.content_hash == checked.content_hash,
        Document.external_id == Document.id,
        Document.title == checked.new.title,
    )
    for row in connection.execute(unnamed.order_by(Document.id)):
        found = document_row(row)
        if canonical_json(found.metadata) == checked.metadata_json:
            return found
    return None


def _insert(connection: Connection, tenant: str, collection_id: str, checked: _Checked) -> DocumentRow:
    new = checked.new
    document_id, moment = new_id("doc"), now()
    connection.execute(
        insert(Document).values(
            id=document_id,
            tenant=tenant,
            collection_id=collection_id,
            external_id=document_id if new.external_id is None else new.external_id,
            title=new.title,
            filename=new.filename,
            media_type=new.media_type,
            metadata_=checked.metadata,
            text=new.text,
            text_bytes=checked.text_bytes,
            content_hash=checked.content_hash,
            status="pending",
            revision=1,
            error=None,
            num_chunks=0,
            num_tokens=0,
            created_at=moment,
            updated_at=moment,
        )
    )
    _insert_values(connection, collection_id, document_id, checked.metadata)
    return _require(connection, tenant, collection_id, document_id)


def _insert_values(
    connection: Connection, collection_id: str, document_id: str, metadata: dict[str, object]
) -> None:
    rows = [
        {
            "document_id": document_id,
            "collection_id": collection_id,
            "key": key,
            "kind": kind_of(value),
            "string": value if isinstance(value, str) else None,
            "number": None if isinstance(value, str) else float(value),
        }
        for key, value in metadata.items()
        if isinstance(value, str | bool | int | float)
    ]
    if rows:
        connection.execute(insert(DocumentValue), rows)


def _require(connection: Connection, tenant: str, collection_id: str, document: str) -> DocumentRow:
    """By id or external id."""
    checked_text("the document's id", document, max_chars=MAX_EXTERNAL_ID_CHARS)
    own = select(*DOCUMENT_COLUMNS).where(Document.tenant == tenant, Document.collection_id == collection_id)
    row = connection.execute(own.where(Document.id == document)).first()
    if row is None:
        row = connection.execute(own.where(Document.external_id == document)).first()
    if row is None:
        raise DocumentNotFound(
            f"document {document[:128]!r} does not exist in this collection",
            hint="memkv documents list shows those that do",
        )
    return document_row(row)
