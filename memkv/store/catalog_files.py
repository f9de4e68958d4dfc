"""Statements about block files: which key has KV, under which digest.

A row stands here only while its file stands under blocks/: rows are written after the file is durable, and
dropped before it is unlinked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, delete, exists, func, insert, select

from memkv.store.block_file import file_name, parse_file_name
from memkv.store.catalog_store import now
from memkv.store.database_errors import damaged
from memkv.store.rows import KVFileRow, Released
from memkv.store.statements import Statements
from memkv.store.tables import Chunk, Collection, KVFile

Item = TypeVar("Item")

_BATCH = 500  # values in one statement
FILE_COLUMNS = (
    KVFile.input_key,
    KVFile.tenant,
    KVFile.fingerprint_digest,
    KVFile.file_digest,
    KVFile.num_tokens,
    KVFile.num_bytes,
    KVFile.collection_id,
)


class FileStatements(Statements):
    def register_files(self, files: Sequence[KVFileRow]) -> list[KVFileRow]:
        """Makes durable files visible. Keys that have a row keep it; returns the rows that were added."""
        added: list[KVFileRow] = []
        with self._database.write() as transaction:
            known = _existing_keys(transaction.connection, [file.input_key for file in files])
            for file in files:
                if file.input_key not in known:
                    known.add(file.input_key)
                    added.append(file)
            if added:
                moment = now()
                transaction.connection.execute(
                    insert(KVFile),
                    [
                        {
                            "input_key": file.input_key,
                            "tenant": file.tenant,
                            "fingerprint_digest": file.fingerprint_digest,
                            "file_digest": file.file_digest,
                            "num_tokens": file.num_tokens,
                            "num_bytes": file.num_bytes,
                            "collection_id": file.collection_id,
                            "generation": transaction.generation,
                            "created_at": moment,
                        }
                        for file in added
                    ],
                )
        return added

    def file_for(self, tenant: str, input_key: str) -> KVFileRow | None:
        with self._database.read() as connection:
            row = connection.execute(
                select(*FILE_COLUMNS).where(KVFile.tenant == tenant, KVFile.input_key == input_key)
            ).first()
        return None if row is None else file_row(row)

    def drop_file(self, tenant: str, input_key: str, file_digest: str) -> bool:
        """Drops the row if it still names this file; whether it did."""
        with self._database.write() as transaction:
            dropped = transaction.connection.execute(
                delete(KVFile).where(
                    KVFile.tenant == tenant,
                    KVFile.input_key == input_key,
                    KVFile.file_digest == file_digest,
                )
            )
            return dropped.rowcount > 0

    def release_unused(self, tenant: str, input_keys: Sequence[str]) -> Released:
        """Those of `input_keys` that no chunk and no prefix refers to; drops their rows."""
        with self._database.read() as connection:
            unused = _unreferenced(connection, tenant, input_keys)
            if not _existing_keys(connection, unused, tenant=tenant):
                return Released(tuple(unused))
        with self._database.write() as transaction:
            return release(transaction.connection, tenant, unused)

    def existing_keys(self, tenant: str, input_keys: Sequence[str]) -> set[str]:
        """Those of `input_keys` that have KV."""
        with self._database.read() as connection:
            return _existing_keys(connection, input_keys, tenant=tenant)

    def kv_totals(self) -> tuple[int, int]:
        """Files and their bytes, of all tenants."""
        statement = select(func.count(), func.coalesce(func.sum(KVFile.num_bytes), 0))
        with self._database.read() as connection:
            files, total = connection.execute(statement).one()
        return files, int(total)

    def files_of_all_tenants(self) -> list[KVFileRow]:
        """For recovery and verification."""
        with self._database.read() as connection:
            rows = connection.execute(select(*FILE_COLUMNS).order_by(KVFile.input_key))
            return [file_row(row) for row in rows]

    def drop_files_of_all_tenants(self, files: Sequence[KVFileRow]) -> None:
        """For recovery and eviction: drops rows whose file is gone, or is to go."""
        with self._database.write() as transaction:
            for batch in in_batches([file.input_key for file in files]):
                transaction.connection.execute(delete(KVFile).where(KVFile.input_key.in_(batch)))


def in_batches(values: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(values), _BATCH):
        yield values[start : start + _BATCH]


def release(connection: Connection, tenant: str, input_keys: Sequence[str]) -> Released:
    """Those of `input_keys` that no chunk and no collection's prefix refers to; drops their rows.

    Called in the transaction that removed the references; the files go after its commit.
    """
    keys = _unreferenced(connection, tenant, input_keys)
    files: list[KVFileRow] = []
    for batch in in_batches(keys):
        rows = (KVFile.tenant == tenant, KVFile.input_key.in_(batch))
        files.extend(map(file_row, connection.execute(select(*FILE_COLUMNS).where(*rows))))
        connection.execute(delete(KVFile).where(*rows))
    return Released(tuple(keys), tuple(files))


def _unreferenced(connection: Connection, tenant: str, input_keys: Sequence[str]) -> list[str]:
    """Those that no chunk and no prefix refers to, each once."""
    found: list[str] = []
    for batch in in_batches(sorted(set(input_keys))):
        chunks = select(Chunk.input_key).where(Chunk.tenant == tenant, Chunk.input_key.in_(batch))
        prefixes = select(Collection.prefix_key).where(
            Collection.tenant == tenant, Collection.prefix_key.in_(batch)
        )
        used = set(connection.execute(chunks.union(prefixes)).scalars())
        found.extend(key for key in batch if key not in used)
    return found


def is_unused() -> tuple[ColumnElement[bool], ...]:
    """True of rows whose key no chunk and no prefix refers to."""
    return (
        ~exists().where(Chunk.tenant == KVFile.tenant, Chunk.input_key == KVFile.input_key),
        ~exists().where(Collection.tenant == KVFile.tenant, Collection.prefix_key == KVFile.input_key),
    )


def file_row(values: Sequence[Any]) -> KVFileRow:
    row = KVFileRow(*values)
    if parse_file_name(file_name(row.input_key, row.file_digest)) is None:  # it becomes a path
        raise damaged("a block file's name is not one")
    return row


def _existing_keys(
    connection: Connection, input_keys: Sequence[str], *, tenant: str | None = None
) -> set[str]:
    found: set[str] = set()
    for batch in in_batches(input_keys):
        statement = select(KVFile.input_key).where(KVFile.input_key.in_(batch))
        if tenant is not None:
            statement = statement.where(KVFile.tenant == tenant)
        found.update(connection.execute(statement).scalars())
    return found
