"""Statements about what reuse costs a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import delete, insert, select

from memkv.store.catalog_store import now
from memkv.store.database import Database
from memkv.store.rows import GateRow
from memkv.store.tables import Gate


class GateStatements:
    """Raises DatabaseUnavailable, DatabaseDamaged; writing also InsufficientStorageError, StoreFenced."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put_gates(self, model_digest: str, data: str, rows: Sequence[GateRow]) -> None:
        """Replaces everything that was measured of this model on this data."""
        with self._database.write() as transaction:
            transaction.connection.execute(
                delete(Gate).where(Gate.model_digest == model_digest, Gate.data == data)
            )
            if rows:
                own = {"model_digest": model_digest, "data": data, "measured_at": now()}
                transaction.connection.execute(insert(Gate), [{**asdict(row), **own} for row in rows])

    def gates(self, model_digest: str) -> list[GateRow]:
        """All that was measured of this model, on any data."""
        statement = (
            select(Gate.kind, Gate.policy, Gate.questions, Gate.fresh, Gate.dnll_high, Gate.accuracy_full)
            .where(Gate.model_digest == model_digest)
            .order_by(Gate.data, Gate.kind, Gate.policy)
        )
        with self._database.read() as connection:
            return [GateRow(*row) for row in connection.execute(statement)]
