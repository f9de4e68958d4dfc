"""Statements about what reuse costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from sqlalchemy import delete, insert, select

from memkv.store.catalog_store import now
from memkv.store.rows import GateRow
from memkv.store.statements import Statements
from memkv.store.tables import Gate

_COLUMNS = [getattr(Gate, field.name) for field in fields(GateRow)]


class GateStatements(Statements):
    def put_gates(self, fingerprint_digest: str, rows: Sequence[GateRow]) -> None:
        """Replaces all that was measured under this fingerprint on the same data, in the same form."""
        with self._database.write() as transaction:
            for data, chunk_tokens, length in {(row.data, row.chunk_tokens, row.length) for row in rows}:
                transaction.connection.execute(
                    delete(Gate).where(
                        Gate.fingerprint_digest == fingerprint_digest,
                        Gate.data == data,
                        Gate.chunk_tokens == chunk_tokens,
                        Gate.length == length,
                    )
                )
            own = {"fingerprint_digest": fingerprint_digest, "measured_at": now()}
            transaction.connection.execute(insert(Gate), [{**asdict(row), **own} for row in rows])

    def drop_gates(self, fingerprint_digest: str) -> None:
        """Forgets all that was measured under this fingerprint."""
        with self._database.write() as transaction:
            transaction.connection.execute(delete(Gate).where(Gate.fingerprint_digest == fingerprint_digest))

    def gates(self, fingerprint_digest: str) -> list[GateRow]:
        """All that was measured under this fingerprint."""
        statement = (
            select(*_COLUMNS)
            .where(Gate.fingerprint_digest == fingerprint_digest)
            .order_by(Gate.data, Gate.chunk_tokens, Gate.length, Gate.kind, Gate.policy)
        )
        with self._database.read() as connection:
            return [GateRow(*row) for row in connection.execute(statement)]
