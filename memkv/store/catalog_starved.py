"""Statements about documents that failed because their KV found no room: to be tried again when there is."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Text, select, type_coerce

from memkv.errors import InsufficientStorageError
from memkv.store.catalog_documents import DOCUMENT_COLUMNS, document_row
from memkv.store.catalog_job_ends import make_pending
from memkv.store.catalog_jobs import insert_job
from memkv.store.plain_values import canonical_json
from memkv.store.rows import DocumentRow
from memkv.store.statements import Statements
from memkv.store.tables import Document

# As `JSONText` writes it.
_CODE = canonical_json({"code": InsufficientStorageError.code}).strip("{}")


class StarvedStatements(Statements):
    def starved_documents(self) -> list[DocumentRow]:
        """Of all tenants, in the order in which they came."""
        statement = select(*DOCUMENT_COLUMNS).where(
            Document.status == "failed", type_coerce(Document.error, Text).contains(_CODE, autoescape=True)
        )
        with self._database.read() as connection:
            return [document_row(row) for row in connection.execute(statement.order_by(Document.id))]

    def retry_documents(self, documents: Sequence[DocumentRow]) -> None:
        """Makes failed documents of one collection pending again, in one job."""
        with self._database.write() as transaction:
            work: dict[str, int] = {}
            for document in documents:
                as_seen = (Document.id == document.id, Document.revision == document.revision)
                work |= make_pending(transaction.connection, Document.tenant == document.tenant, *as_seen)
            if work:
                first = documents[0]
                insert_job(
                    transaction,
                    first.tenant,
                    first.collection_id,
                    "ingest",
                    list(work),
                    total=sum(work.values()),
                    unit="bytes",
                )
