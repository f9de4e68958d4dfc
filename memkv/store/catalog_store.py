"""Statements about the store itself and its tenants."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from sqlalchemy import Connection, func, insert, select, update

from memkv.errors import BadRequestError, NotFoundError
from memkv.store.database import Database
from memkv.store.database_errors import damaged
from memkv.store.plain_values import checked_name
from memkv.store.rows import DEFAULT_TENANT
from memkv.store.statements import Statements
from memkv.store.tables import Collection, Document, StoreState, Tenant

_SECRET_BYTES = 32


def now() -> datetime:
    """For people to read; nothing but access keys goes by it."""
    return datetime.now(UTC)


class StoreStatements(Statements):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._secrets: dict[str, bytes] = {}

    def store_id(self) -> str | None:
        """The id this database was given at its first opening; None before that."""
        with self._database.read() as connection:
            return connection.execute(select(StoreState.store_id)).scalar()

    def create_store(self, store_id: str) -> None:
        """Writes the store's one row and the default tenant."""
        with self._database.unfenced_write() as connection:
            connection.execute(
                insert(StoreState).values(id=1, store_id=store_id, epoch=0, generation=0, created_at=now())
            )
            _insert_tenant(connection, DEFAULT_TENANT)

    def take_over(self) -> int:
        """A new epoch: every other process that still writes to this store is fenced from now on."""
        with self._database.unfenced_write() as connection:
            epoch = connection.execute(
                update(StoreState).values(epoch=StoreState.epoch + 1).returning(StoreState.epoch)
            ).scalar()
        if epoch is None:
            raise damaged("the store's row is gone")
        self._database.adopt_epoch(epoch)
        return epoch

    def generation(self) -> int:
        with self._database.read() as connection:
            return connection.execute(select(StoreState.generation)).scalar() or 0

    def create_tenant(self, tenant: str) -> None:
        """Makes a tenant with a secret of its own.

        Raises:
            BadRequestError: the name is not possible or taken.
        """
        checked_name("the tenant's name", tenant)
        with self._database.write() as transaction:
            taken = transaction.connection.execute(select(Tenant.name).where(Tenant.name == tenant)).scalar()
            if taken is not None:
                raise BadRequestError(f"tenant {tenant!r} exists", hint="choose another name")
            _insert_tenant(transaction.connection, tenant)

    def tenants(self) -> list[str]:
        with self._database.read() as connection:
            return list(connection.execute(select(Tenant.name).order_by(Tenant.name)).scalars())

    def tenant_secret(self, tenant: str) -> bytes:
        """The key of the tenant's input keys, 32 bytes. Raises NotFoundError for an unknown tenant."""
        known = self._secrets.get(tenant)
        if known is None:
            checked_name("the tenant's name", tenant)
            with self._database.read() as connection:
                known = read_tenant_secret(connection, tenant)
            self._secrets[tenant] = known
        return known

    def totals(self) -> dict[str, int]:
        """Rows of all tenants, for stats."""
        with self._database.read() as connection:
            collections = connection.execute(select(func.count()).select_from(Collection)).scalar_one()
            found = {"collections": collections}
            statement = select(Document.status, func.count()).group_by(Document.status)
            by_status = dict(connection.execute(statement).all())
            for status in ("pending", "ready", "failed"):
                found[f"documents_{status}"] = by_status.get(status, 0)
            numbers = select(
                func.coalesce(func.sum(Document.num_chunks), 0),
                func.coalesce(func.sum(Document.num_tokens), 0),
            )
            chunks, tokens = connection.execute(numbers).one()
        return {**found, "chunks": int(chunks), "tokens": int(tokens)}


def read_tenant_secret(connection: Connection, tenant: str) -> bytes:
    secret = connection.execute(select(Tenant.secret).where(Tenant.name == tenant)).scalar()
    if secret is None:
        raise NotFoundError(f"tenant {tenant!r} does not exist", hint="make it first: create_tenant")
    if len(secret) != _SECRET_BYTES:
        raise damaged("a tenant's secret has a wrong length")
    return secret


def _insert_tenant(connection: Connection, tenant: str) -> None:
    connection.execute(
        insert(Tenant).values(name=tenant, secret=secrets.token_bytes(_SECRET_BYTES), created_at=now())
    )
