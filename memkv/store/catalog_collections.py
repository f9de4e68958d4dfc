"""Statements about collections."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import fields

from sqlalchemy import Connection, delete, func, insert, or_, select, update

from memkv.errors import BadRequestError, CollectionExists, CollectionNotFound
from memkv.kv.fingerprint import input_key
from memkv.store.catalog_files import release
from memkv.store.catalog_job_ends import abandon_jobs
from memkv.store.catalog_jobs import renew_documents
from memkv.store.catalog_store import now, read_tenant_secret
from memkv.store.ids import new_id
from memkv.store.paging import read_page
from memkv.store.plain_values import checked_metadata, checked_name, checked_text
from memkv.store.rows import (
    CollectionCounts,
    CollectionRow,
    DeletedCollection,
    NewCollection,
    Page,
    PageRequest,
    RenewedCollection,
)
from memkv.store.statements import Statements
from memkv.store.tables import Chunk, Collection, Document, KVFile

_DIGEST = re.compile(r"^[0-9a-f]{64}\Z")
_STAMP_BYTES = 16
_COLUMNS = (
    Collection.id,
    Collection.tenant,
    Collection.name,
    Collection.description,
    Collection.metadata_,
    Collection.fingerprint_digest,
    Collection.fingerprint_json,
    Collection.embedder_name,
    Collection.embedder_digest,
    Collection.dim,
    Collection.max_chunk_tokens,
    Collection.block_size,
    Collection.prefill,
    Collection.system_prompt,
    Collection.prefix_ids,
    Collection.prefix_key,
    Collection.primer,
    Collection.generation,
    Collection.stamp,
    Collection.created_at,
    Collection.model_name,
    Collection.max_kv_bytes,
)


class CollectionStatements(Statements):
    def create_collection(self, tenant: str, new: NewCollection) -> CollectionRow:
        """Makes a collection; its prefix key follows from tenant, fingerprint and prefix.

        Raises:
            CollectionExists: the tenant has one of this name.
            BadRequestError: a value cannot be stored.
            NotFoundError: there is no such tenant.
        """
        checked_name("the collection's name", new.name)
        checked_text("the description", new.description, max_chars=10_000)
        checked_text("the system prompt", new.system_prompt, max_chars=1_000_000)
        metadata = checked_metadata("metadata", new.metadata)
        if not _DIGEST.match(new.fingerprint_digest):
            raise BadRequestError(
                "the fingerprint's digest is not 64 hex digits", hint="give that of a Fingerprint"
            )
        with self._database.write() as transaction:
            connection = transaction.connection
            secret = read_tenant_secret(connection, tenant)
            if _find(connection, tenant, new.name) is not None:
                raise CollectionExists(
                    f"collection {new.name!r} exists", hint="choose another name, or delete it first"
                )
            row = CollectionRow(
                id=new_id("col"),
                tenant=tenant,
                name=new.name,
                description=new.description,
                metadata=metadata,
                fingerprint_digest=new.fingerprint_digest,
                fingerprint_json=new.fingerprint_json,
                embedder_name=new.embedder_name,
                embedder_digest=new.embedder_digest,
                dim=new.dim,
                max_chunk_tokens=new.max_chunk_tokens,
                block_size=new.block_size,
                prefill=new.prefill,
                system_prompt=new.system_prompt,
                prefix_ids=tuple(new.prefix_ids),
                prefix_key=input_key(secret, new.fingerprint_digest, (), new.prefix_ids),
                primer=new.primer,
                generation=0,
                stamp=secrets.token_bytes(_STAMP_BYTES),
                created_at=now(),
                model_name=new.model_name,
                max_kv_bytes=new.max_kv_bytes,
            )
            values = {field.name: getattr(row, field.name) for field in fields(row)}
            connection.execute(insert(Collection).values(metadata_=values.pop("metadata"), **values))
        return row

    def get_collection(self, tenant: str, name: str) -> CollectionRow:
        """Raises CollectionNotFound."""
        checked_text("the collection's name", name, max_chars=256)
        with self._database.read() as connection:
            row = _find(connection, tenant, name)
        if row is None:
            raise CollectionNotFound(
                f"collection {name[:128]!r} does not exist", hint="memkv collections list shows those that do"
            )
        return row

    def collection_by_id(self, tenant: str, collection_id: str) -> CollectionRow:
        """Raises CollectionNotFound."""
        with self._database.read() as connection:
            row = connection.execute(
                select(*_COLUMNS).where(Collection.tenant == tenant, Collection.id == collection_id)
            ).first()
        if row is None:
            raise CollectionNotFound("the collection does not exist any more")
        return CollectionRow(*row)

    def list_collections(
        self, tenant: str, page: PageRequest, *, within: frozenset[str] | None = None
    ) -> Page[CollectionRow]:
        """`within`: only those of these names."""
        statement = select(*_COLUMNS).where(Collection.tenant == tenant)
        if within is not None:
            statement = statement.where(Collection.name.in_(within))
        with self._database.read() as connection:
            return read_page(connection, statement, page, order_by=Collection.id, make=CollectionRow)

    def update_collection(
        self,
        tenant: str,
        name: str,
        *,
        description: str | None = None,
        prefill: str | None = None,
        max_kv_bytes: int | None = None,
    ) -> CollectionRow:
        """Changes what is given. Raises CollectionNotFound, BadRequestError."""
        row = self.get_collection(tenant, name)
        values = {"description": description, "prefill": prefill, "max_kv_bytes": max_kv_bytes}
        given = {key: value for key, value in values.items() if value is not None}
        if description is not None:
            checked_text("the description", description, max_chars=10_000)
        if given:
            with self._database.write() as transaction:
                transaction.connection.execute(
                    update(Collection)
                    .where(Collection.tenant == tenant, Collection.id == row.id)
                    .values(**given)
                )
        return self.get_collection(tenant, name)

    def all_collections(self) -> list[CollectionRow]:
        """Of all tenants."""
        with self._database.read() as connection:
            rows = connection.execute(select(*_COLUMNS).order_by(Collection.id))
            return [CollectionRow(*row) for row in rows]

    def renew_collection(
        self, row: CollectionRow, new: NewCollection, arguments: Mapping[str, object] | None = None
    ) -> RenewedCollection:
        """Gives a collection to another model: its chunks go, its documents are pending again, in one job.

        Of `new`, what depends on the model and the embedder is taken over; the job is given `arguments`.
        Raises CollectionNotFound.
        """
        with self._database.write() as transaction:
            connection = transaction.connection
            own = (Chunk.tenant == row.tenant, Chunk.collection_id == row.id)
            keys = list(connection.execute(select(Chunk.input_key).where(*own).distinct()).scalars())
            connection.execute(delete(Chunk).where(*own))
            secret = read_tenant_secret(connection, row.tenant)
            changed = connection.execute(
                update(Collection)
                .where(Collection.tenant == row.tenant, Collection.id == row.id)
                .values(
                    fingerprint_digest=new.fingerprint_digest,
                    fingerprint_json=new.fingerprint_json,
                    embedder_name=new.embedder_name,
                    embedder_digest=new.embedder_digest,
                    dim=new.dim,
                    prefix_ids=tuple(new.prefix_ids),
                    prefix_key=input_key(secret, new.fingerprint_digest, (), new.prefix_ids),
                    model_name=new.model_name,
                )
            )
            if not changed.rowcount:
                raise CollectionNotFound("the collection does not exist any more")
            advance_collection(connection, row.id)
            job = renew_documents(transaction, row.tenant, row.id, arguments)
            released = release(connection, row.tenant, [*keys, row.prefix_key])
        return RenewedCollection(released, job)

    def count_collection(self, tenant: str, collection_id: str) -> CollectionCounts:
        with self._database.read() as connection:
            statement = (
                select(Document.status, func.count())
                .where(Document.tenant == tenant, Document.collection_id == collection_id)
                .group_by(Document.status)
            )
            by_status = dict(connection.execute(statement).all())
            chunks, tokens = connection.execute(
                select(
                    func.coalesce(func.sum(Document.num_chunks), 0),
                    func.coalesce(func.sum(Document.num_tokens), 0),
                ).where(Document.tenant == tenant, Document.collection_id == collection_id)
            ).one()
            used = select(Chunk.input_key).where(Chunk.tenant == tenant, Chunk.collection_id == collection_id)
            prefix = select(Collection.prefix_key).where(
                Collection.tenant == tenant, Collection.id == collection_id
            )
            files, num_bytes = connection.execute(
                select(func.count(), func.coalesce(func.sum(KVFile.num_bytes), 0)).where(
                    KVFile.tenant == tenant,
                    or_(KVFile.input_key.in_(used), KVFile.input_key.in_(prefix)),
                )
            ).one()
        return CollectionCounts(
            pending=by_status.get("pending", 0),
            ready=by_status.get("ready", 0),
            failed=by_status.get("failed", 0),
            chunks=int(chunks),
            tokens=int(tokens),
            kv_files=files,
            kv_bytes=int(num_bytes),
        )

    def delete_collection(self, tenant: str, name: str) -> DeletedCollection:
        """Removes the collection with everything in it, in one transaction. Raises CollectionNotFound."""
        collection = self.get_collection(tenant, name)
        with self._database.write() as transaction:
            connection = transaction.connection
            own_chunks = (Chunk.tenant == tenant, Chunk.collection_id == collection.id)
            keys = list(connection.execute(select(Chunk.input_key).where(*own_chunks).distinct()).scalars())
            chunks = connection.execute(delete(Chunk).where(*own_chunks)).rowcount
            documents = connection.execute(
                delete(Document).where(Document.tenant == tenant, Document.collection_id == collection.id)
            ).rowcount
            gone = connection.execute(
                delete(Collection).where(Collection.tenant == tenant, Collection.id == collection.id)
            ).rowcount
            if not gone:
                raise CollectionNotFound(f"collection {name[:128]!r} does not exist any more")
            abandon_jobs(connection, tenant, collection.id)
            released = release(connection, tenant, [*keys, collection.prefix_key])
        return DeletedCollection(
            collection_id=collection.id,
            documents=documents,
            chunks=chunks,
            kv_files=len(released.files),
            kv_bytes=sum(file.num_bytes for file in released.files),
            released=released,
        )


def advance_collection(connection: Connection, collection_id: str) -> tuple[int, bytes]:
    """Counts a change of the collection's vectors: its new generation and stamp."""
    stamp = secrets.token_bytes(_STAMP_BYTES)
    generation = connection.execute(
        update(Collection)
        .where(Collection.id == collection_id)
        .values(generation=Collection.generation + 1, stamp=stamp)
        .returning(Collection.generation)
    ).scalar_one()
    return generation, stamp


def _find(connection: Connection, tenant: str, name: str) -> CollectionRow | None:
    row = connection.execute(
        select(*_COLUMNS).where(Collection.tenant == tenant, Collection.name == name)
    ).first()
    return None if row is None else CollectionRow(*row)
