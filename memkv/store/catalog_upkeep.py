"""Statements for whoever keeps the store, of all tenants: which files there are, are needed, read, used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, delete, exists, func, insert, or_, select, update

from memkv.errors import BadRequestError, NotFoundError
from memkv.store.catalog_files import FILE_COLUMNS, file_row, in_batches, is_unused
from memkv.store.catalog_store import now
from memkv.store.paging import read_page
from memkv.store.plain_values import checked_text
from memkv.store.rows import FileState, KeyedChunk, KVFileRow, Page, PageRequest, Reference
from memkv.store.statements import Statements
from memkv.store.tables import Chunk, Collection, Document, Job, KVFile, KVUse

_FEWEST_DIGITS = 8  # of a key that is cut short
_HAS_KV = exists().where(KVFile.tenant == Chunk.tenant, KVFile.input_key == Chunk.input_key)


class UpkeepStatements(Statements):
    def list_files(
        self, page: PageRequest, *, collection_id: str | None = None, unused: bool = False
    ) -> Page[FileState]:
        """In order of their keys; of one collection, or only those that nothing refers to."""
        statement = _states()
        if collection_id is not None:
            statement = statement.where(KVFile.collection_id == collection_id)
        if unused:
            statement = statement.where(*is_unused())
        with self._database.read() as connection:
            return read_page(connection, statement, page, order_by=KVFile.input_key, make=_state)

    def find_file(self, key: str) -> FileState:
        """By its key, or the first digits of it. Raises NotFoundError, BadRequestError."""
        checked_text("the key", key, max_chars=64)
        if len(key) < _FEWEST_DIGITS or not set(key) <= set("0123456789abcdef"):
            raise BadRequestError(
                f"{key!r} is not a key", hint=f"give {_FEWEST_DIGITS} or more of its 64 hex digits"
            )
        # A range and not LIKE: it is found through the primary key.
        statement = _states().where(KVFile.input_key >= key, KVFile.input_key <= key.ljust(64, "f")).limit(2)
        with self._database.read() as connection:
            rows = connection.execute(statement).all()
        if not rows:
            raise NotFoundError(f"no chunk whose key begins with {key} has KV", hint="memkv store ls")
        if len(rows) > 1:
            raise BadRequestError(f"several keys begin with {key}", hint="give more of its digits")
        return _state(*rows[0])

    def references(self, tenant: str, input_key: str, *, limit: int = 100) -> list[Reference]:
        """The chunks that a key is of, at most `limit`."""
        statement = (
            select(Collection.name, Document.id, Document.external_id, Chunk.ordinal)
            .join(Document, Document.id == Chunk.document_id)
            .join(Collection, Collection.id == Chunk.collection_id)
            .where(Chunk.tenant == tenant, Chunk.input_key == input_key)
            .order_by(Chunk.row_id)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [Reference(*row) for row in connection.execute(statement)]

    def chunk_of_key(self, tenant: str, input_key: str) -> KeyedChunk:
        """Any chunk of this key. Raises NotFoundError."""
        statement = select(Chunk.collection_id, Chunk.token_ids).where(
            Chunk.tenant == tenant, Chunk.input_key == input_key
        )
        with self._database.read() as connection:
            row = connection.execute(statement.limit(1)).first()
        if row is None:
            raise NotFoundError("no chunk has this key", hint="memkv store gc removes files of such keys")
        return KeyedChunk(*row)

    def files_of(self, collection_id: str) -> list[KVFileRow]:
        """Files that a collection's chunks and its prefix need, whichever collection they were made for."""
        keys = select(Chunk.input_key).where(Chunk.collection_id == collection_id)
        prefix = select(Collection.prefix_key).where(Collection.id == collection_id)
        statement = select(*FILE_COLUMNS).where(or_(KVFile.input_key.in_(keys), KVFile.input_key.in_(prefix)))
        with self._database.read() as connection:
            return [file_row(row) for row in connection.execute(statement.order_by(KVFile.input_key))]

    def documents_without_kv(self, tenant: str, collection_id: str) -> list[str]:
        """Ids of documents with a chunk that lacks KV, in the order in which they came."""
        statement = (
            select(Chunk.document_id)
            .where(Chunk.tenant == tenant, Chunk.collection_id == collection_id, ~_HAS_KV)
            .distinct()
            .order_by(Chunk.document_id)
        )
        with self._database.read() as connection:
            return list(connection.execute(statement).scalars())

    def tokens_without_kv(self, tenant: str, collection_id: str) -> list[int]:
        """The tokens of each chunk that lacks KV; of chunks that share it, once."""
        statement = (
            select(func.max(func.length(Chunk.token_ids)))  # four bytes each
            .where(Chunk.tenant == tenant, Chunk.collection_id == collection_id, ~_HAS_KV)
            .group_by(Chunk.input_key)
        )
        with self._database.read() as connection:
            return [size // 4 for size in connection.execute(statement).scalars()]

    def unused_files(self) -> list[KVFileRow]:
        """Files whose key nothing refers to, and nothing that is being made ready will.

        A job publishes files before it commits the chunks that name them: what was published since the
        oldest live job was queued is left out.
        """
        oldest = select(func.min(Job.sequence)).where(Job.status.in_(("queued", "running")))
        with self._database.read() as connection:
            since = connection.execute(oldest).scalar()
            statement = select(*FILE_COLUMNS).where(*is_unused())
            if since is not None:
                statement = statement.where(KVFile.generation < since)
            return [file_row(row) for row in connection.execute(statement.order_by(KVFile.input_key))]

    def collections_files(self, collection_id: str | None = None) -> list[KVFileRow]:
        """Chunks' files, of one collection or of all, those used longest ago first; no prefixes."""
        prefix = exists().where(Collection.tenant == KVFile.tenant, Collection.prefix_key == KVFile.input_key)
        statement = (
            select(*FILE_COLUMNS)
            .outerjoin(KVUse, KVUse.input_key == KVFile.input_key)
            .where(~prefix)
            .order_by(func.coalesce(KVUse.used_at, KVFile.created_at), KVFile.input_key)
        )
        if collection_id is not None:
            statement = statement.where(KVFile.collection_id == collection_id)
        with self._database.read() as connection:
            return [file_row(row) for row in connection.execute(statement)]

    def files_to_verify(self, limit: int, older_than: timedelta) -> list[KVFileRow]:
        """Those whose bytes were not read for so long, the longest ago first."""
        moment = now()
        read_at = func.coalesce(KVFile.verified_at, KVFile.created_at)
        statement = (
            select(*FILE_COLUMNS)
            .where(or_(read_at <= moment - older_than, read_at > moment))  # a clock that went back
            .order_by(read_at, KVFile.input_key)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [file_row(row) for row in connection.execute(statement)]

    def files_by_verification(self) -> list[KVFileRow]:
        """All of all tenants: those whose bytes were not read for the longest first."""
        moment = now()
        read_at = func.coalesce(KVFile.verified_at, KVFile.created_at)
        order = (read_at <= moment, read_at, KVFile.input_key)  # first what a clock that went back marked
        with self._database.read() as connection:
            return [file_row(row) for row in connection.execute(select(*FILE_COLUMNS).order_by(*order))]

    def mark_verified(self, files: Sequence[KVFileRow]) -> None:
        """Every byte of these was read just now, and was right."""
        with self._database.write() as transaction:
            for batch in in_batches([file.input_key for file in files]):
                transaction.connection.execute(
                    update(KVFile).where(KVFile.input_key.in_(batch)).values(verified_at=now())
                )

    def rows_from_the_future(self, slack: timedelta) -> tuple[int, datetime | None]:
        """How many moments were written down that lie further ahead than `slack`, and the latest of them."""
        late = now() + slack
        found: list[datetime] = []
        count = 0
        columns = (Document.updated_at, Job.created_at, KVFile.created_at, KVFile.verified_at, KVUse.used_at)
        with self._database.read() as connection:
            for column in columns:
                row = connection.execute(select(func.count(), func.max(column)).where(column > late)).one()
                count += row[0]
                found += [row[1]] if row[1] is not None else []
        return count, max(found, default=None)

    def kv_bytes(self, *, tenant: str | None = None, collection_id: str | None = None) -> int:
        """Bytes of block files: of all, of a tenant, or made for a collection."""
        statement = select(func.coalesce(func.sum(KVFile.num_bytes), 0))
        if tenant is not None:
            statement = statement.where(KVFile.tenant == tenant)
        if collection_id is not None:
            statement = statement.where(KVFile.collection_id == collection_id)
        with self._database.read() as connection:
            return int(connection.execute(statement).scalar_one())

    def kv_bytes_by_collection(self) -> dict[str, int]:
        """Name -> bytes of the block files made for it; of one name in several tenants, their sum."""
        statement = (
            select(Collection.name, func.coalesce(func.sum(KVFile.num_bytes), 0))
            .outerjoin(KVFile, KVFile.collection_id == Collection.id)
            .group_by(Collection.name)
        )
        with self._database.read() as connection:
            return {name: int(size) for name, size in connection.execute(statement)}

    def collection_cap(self, collection_id: str) -> int:
        """The collection's own cap in bytes; 0 where it has none, or is gone."""
        with self._database.read() as connection:
            cap = connection.execute(select(Collection.max_kv_bytes).where(Collection.id == collection_id))
            return cap.scalar() or 0

    def collection_ids(self) -> set[str]:
        with self._database.read() as connection:
            return set(connection.execute(select(Collection.id)).scalars())

    def uses_of(self, input_key: str) -> int:
        with self._database.read() as connection:
            return connection.execute(select(KVUse.uses).where(KVUse.input_key == input_key)).scalar() or 0

    def most_used_files(self, limit: int) -> list[KVFileRow]:
        """Of what was used at all, what was used most first; of equals what was used last."""
        statement = (
            select(*FILE_COLUMNS)
            .join(KVUse, KVUse.input_key == KVFile.input_key)
            .order_by(KVUse.uses.desc(), KVUse.used_at.desc(), KVFile.input_key)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [file_row(row) for row in connection.execute(statement)]

    def add_uses(self, uses: Mapping[tuple[str, str], int]) -> None:
        """(tenant, key) -> how often it was used since it was added last."""
        moment = now()
        with self._database.write() as transaction:
            connection = transaction.connection
            for (tenant, key), count in uses.items():
                known = connection.execute(
                    update(KVUse)
                    .where(KVUse.input_key == key)
                    .values(uses=KVUse.uses + count, used_at=moment)
                )
                if not known.rowcount:
                    connection.execute(
                        insert(KVUse).values(input_key=key, tenant=tenant, uses=count, used_at=moment)
                    )

    def forget_uses(self) -> int:
        """Drops what is counted of keys that no chunk has any more; returns how many."""
        gone = ~exists().where(Chunk.tenant == KVUse.tenant, Chunk.input_key == KVUse.input_key)
        with self._database.write() as transaction:
            return transaction.connection.execute(delete(KVUse).where(gone)).rowcount


def _states() -> Select[*tuple[Any, ...]]:
    chunks = (
        select(func.count())
        .where(Chunk.tenant == KVFile.tenant, Chunk.input_key == KVFile.input_key)
        .scalar_subquery()
    )
    prefixes = (
        select(func.count())
        .where(Collection.tenant == KVFile.tenant, Collection.prefix_key == KVFile.input_key)
        .scalar_subquery()
    )
    name = select(Collection.name).where(Collection.id == KVFile.collection_id).scalar_subquery()
    return select(
        *FILE_COLUMNS,
        func.coalesce(name, ""),
        chunks + prefixes,
        func.coalesce(KVUse.uses, 0),
        KVFile.created_at,
        KVFile.verified_at,
        KVUse.used_at,
    ).outerjoin(KVUse, KVUse.input_key == KVFile.input_key)


def _state(*values: Any) -> FileState:
    width = len(FILE_COLUMNS)
    return FileState(file_row(values[:width]), *values[width:])
