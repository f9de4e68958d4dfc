"""Statements about access keys.

Each write is one transaction that no epoch fences: keys have nothing to do with what else is stored, and are
made and revoked beside a server that has the store open, too. A row is never removed: a store that once had a
key wants one for good, also when none is valid any more, or a snapshot is restored (`restored_keys.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, insert, or_, select, update

from memkv.errors import AccessKeyNotFound, ConflictError
from memkv.store.catalog_store import now
from memkv.store.ids import new_id
from memkv.store.paging import read_page
from memkv.store.plain_values import checked_text
from memkv.store.rows import AccessKeyRow, KeptKey, NewAccessKey, Page, PageRequest
from memkv.store.statements import Statements
from memkv.store.tables import AccessKey

_COLUMNS = [getattr(AccessKey, field.name) for field in fields(AccessKeyRow)]

# Every request to a server asks these: made once, they cost half.
_BY_DIGEST = select(*_COLUMNS).where(AccessKey.digest == bindparam("digest"))
_ANY = select(AccessKey.id).limit(1)


class KeyStatements(Statements):
    def create_key(self, new: NewAccessKey, prefix: str, digest: str) -> AccessKeyRow:
        """Raises ConflictError for a key that is not an admin's where no valid key is."""
        row = AccessKeyRow(
            id=new_id("key"), prefix=prefix, created_at=now(), revoked_at=None, **_values_of(new)
        )
        with self._database.unfenced_write() as connection:
            if new.scope != "admin" and not connection.execute(_valid_admins()).all():
                raise ConflictError(
                    "there is no valid key of scope admin, and this one would shut out whoever has none",
                    hint="make that first: memkv keys create --scope admin",
                )
            connection.execute(insert(AccessKey).values(digest=digest, **asdict(row)))
        return row

    def list_keys(self, page: PageRequest) -> Page[AccessKeyRow]:
        with self._database.read() as connection:
            return read_page(connection, select(*_COLUMNS), page, order_by=AccessKey.id, make=_row)

    def get_key(self, key_id: str) -> AccessKeyRow:
        """Raises AccessKeyNotFound."""
        checked_text("the key's id", key_id, max_chars=256)
        with self._database.read() as connection:
            return _get(connection, key_id)

    def key_of(self, digest: str) -> AccessKeyRow | None:
        """The key whose secret has this digest, valid or not."""
        with self._database.read() as connection:
            row = connection.execute(_BY_DIGEST, {"digest": digest}).first()
        return None if row is None else _row(*row)

    def has_keys(self) -> bool:
        """Whether there ever was one."""
        with self._database.read() as connection:
            return connection.execute(_ANY).first() is not None

    def admin_keys(self) -> list[AccessKeyRow]:
        """The valid ones of scope admin."""
        with self._database.read() as connection:
            return [_row(*row) for row in connection.execute(_valid_admins())]

    def change_key(
        self, key_id: str, change: Callable[[AccessKeyRow], NewAccessKey], *, force: bool = False
    ) -> AccessKeyRow:
        """Gives a key the settings that `change` makes of what it is.

        Raises:
            AccessKeyNotFound.
            ConflictError: the key is revoked; or no valid one of scope admin would be left, unless `force`.
        """
        return self._write(key_id, lambda row: _values_of(change(row)), force=force)

    def renew_secret(self, key_id: str, prefix: str, digest: str) -> AccessKeyRow:
        """Raises AccessKeyNotFound, ConflictError for a revoked key."""
        return self._write(key_id, lambda row: {"prefix": prefix, "digest": digest})

    def revoke_key(self, key_id: str, *, force: bool = False) -> AccessKeyRow:
        """Raises what `change_key` does."""
        return self._write(key_id, lambda row: {"revoked_at": now()}, force=force)

    def kept_keys(self) -> list[KeptKey]:
        """All, to be put into another database."""
        with self._database.read() as connection:
            rows = connection.execute(select(*_COLUMNS, AccessKey.digest).order_by(AccessKey.id))
            return [KeptKey(**asdict(_row(*values)), digest=digest) for *values, digest in rows]

    def replace_keys(self, kept: Sequence[KeptKey]) -> None:
        """These, which are some, in the place of all that there are."""
        with self._database.unfenced_write() as connection:
            connection.execute(delete(AccessKey))
            connection.execute(insert(AccessKey), [asdict(key) for key in kept])

    def _write(
        self, key_id: str, values: Callable[[AccessKeyRow], dict[str, Any]], *, force: bool = False
    ) -> AccessKeyRow:
        with self._database.unfenced_write() as connection:
            # Locked until the end, and before any other row: whoever changes keys at the same time waits.
            administered = bool(connection.execute(_valid_admins().with_for_update()).all())
            row = _get(connection, key_id)
            if row.revoked_at is not None:
                raise ConflictError(f"key {key_id} is revoked", hint="make a new one: memkv keys create")
            connection.execute(update(AccessKey).where(AccessKey.id == key_id).values(**values(row)))
            if administered and not force and not connection.execute(_valid_admins()).all():
                raise ConflictError(
                    "it is the last valid key of scope admin",
                    hint="make another one first, or say force: then only memkv keys create, on the data "
                    "directory itself, makes one again",
                )
            return _get(connection, key_id)


def _values_of(new: NewAccessKey) -> dict[str, Any]:
    """Its columns, as both databases can hold them. Raises BadRequestError."""
    checked_text("the key's name", new.name, max_chars=128)
    return {field.name: getattr(new, field.name) for field in fields(new)}


def _valid_admins() -> Select[*tuple[Any, ...]]:
    return (
        select(*_COLUMNS)
        .where(AccessKey.scope == "admin", AccessKey.revoked_at.is_(None))
        .where(or_(AccessKey.expires_at.is_(None), AccessKey.expires_at > now()))
        .order_by(AccessKey.id)
    )


def _get(connection: Connection, key_id: str) -> AccessKeyRow:
    row = connection.execute(select(*_COLUMNS).where(AccessKey.id == key_id)).first()
    if row is None:
        raise AccessKeyNotFound(f"key {key_id[:128]!r} does not exist")
    return _row(*row)


def _row(*values: Any) -> AccessKeyRow:
    row = AccessKeyRow(*values)
    return row if row.collections is None else replace(row, collections=tuple(row.collections))
