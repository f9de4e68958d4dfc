"""Access keys in the words of the wire: made, listed, changed, revoked, and found by their secrets.

A secret is 256 random bits. Its SHA-256 is what is stored and looked up: nobody can choose what is compared,
so that no time tells anything, and random secrets need no slower digest.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from memkv.errors import AuthenticationError, BadRequestError, ConflictError
from memkv.memory.replies import key_reply, new_key_reply, page_reply, page_rows
from memkv.memory.valid_request import require_valid
from memkv.store import rows
from memkv.store.catalog_keys import KeyStatements
from memkv.store.catalog_store import now
from memkv.wire import AccessKey, AccessKeyCreate, AccessKeyPatch, NewAccessKey, Page, PageRequest

_SECRET = re.compile(r"mkv_[0-9a-f]{64}")
_SHOWN = 12  # characters of a secret, to tell keys apart by
_LOCKED_OUT = "then memkv keys create, on the data directory itself, makes another"


class AccessKeys:
    """Thread-safe."""

    def __init__(self, statements: KeyStatements) -> None:
        self._statements = statements

    def create(self, request: AccessKeyCreate) -> NewAccessKey:
        """Raises `ConflictError` for a key that is not an admin's where no valid key is."""
        require_valid(request)
        secret = _new_secret()
        new = _checked(
            rows.NewAccessKey(
                name=request.name,
                scope=request.scope,
                collections=None if request.collections is None else tuple(request.collections),
                expires_at=_expiry(request.expires_in),
            )
        )
        row = self._statements.create_key(new, secret[:_SHOWN], _digest(secret))
        return new_key_reply(row, secret, self._notes(row))

    def list(self, page: PageRequest) -> Page[AccessKey]:
        require_valid(page)
        return page_reply(self._statements.list_keys(page_rows(page)), key_reply, lambda reply: reply.id)

    def get(self, key_id: str) -> AccessKey:
        """Raises `AccessKeyNotFound`."""
        return key_reply(self._statements.get_key(key_id))

    def update(self, key_id: str, patch: AccessKeyPatch) -> AccessKey:
        """Raises `AccessKeyNotFound`; `ConflictError` as `KeyStatements.change_key` does."""
        require_valid(patch)

        def changed(old: rows.AccessKeyRow) -> rows.NewAccessKey:
            return _checked(
                rows.NewAccessKey(
                    name=old.name if patch.name is None else patch.name,
                    scope=patch.scope or old.scope,
                    collections=old.collections if patch.collections is None else tuple(patch.collections),
                    expires_at=old.expires_at if patch.expires_in is None else _expiry(patch.expires_in),
                )
            )

        row = self._statements.change_key(key_id, changed, force=patch.force)
        return key_reply(row, self._notes(row))

    def rotate(self, key_id: str) -> NewAccessKey:
        """A new secret; the old one is worth nothing from now on.

        Raises `AccessKeyNotFound`; `ConflictError` for a key that is revoked or expired.
        """
        if key_reply(self._statements.get_key(key_id)).status == "expired":
            raise ConflictError(
                f"key {key_id} is expired, and would stay so",
                hint=f"let it expire later first: memkv keys update {key_id} --expires 90d",
            )
        secret = _new_secret()
        row = self._statements.renew_secret(key_id, secret[:_SHOWN], _digest(secret))
        return new_key_reply(row, secret, self._notes(row))

    def revoke(self, key_id: str, *, force: bool = False) -> None:
        """Raises `AccessKeyNotFound`; `ConflictError` as `KeyStatements.revoke_key` does."""
        self._statements.revoke_key(key_id, force=force)

    def exist(self) -> bool:
        """Whether there ever was one: from then on a server asks for them."""
        return self._statements.has_keys()

    def lack_admin(self) -> bool:
        """Whether a server asks for keys and nobody has one that may administer it."""
        return self.exist() and not self._statements.admin_keys()

    def key_of(self, secret: str) -> AccessKey | None:
        """The valid key of a secret, which may be empty; None as long as there is no key at all.

        Raises `AuthenticationError`.
        """
        if _SECRET.fullmatch(secret):
            row = self._statements.key_of(_digest(secret))
            if row is not None:
                return _valid(key_reply(row))
        if not self.exist():
            return None
        if secret:
            raise AuthenticationError(
                "the access key is not known", hint="memkv keys list shows those that exist"
            )
        raise AuthenticationError(
            "this server asks for an access key",
            hint="send Authorization: Bearer mkv_...; clients of memkv read MEMKV_API_KEY",
        )

    def _notes(self, row: rows.AccessKeyRow) -> Sequence[str]:
        """What goes wrong later if nobody thinks of it."""
        if row.scope != "admin" or row.expires_at is None:
            return []
        for key in self._statements.admin_keys():
            if key.expires_at is None or key.expires_at > row.expires_at:
                return []
        return [f"no key of scope admin outlasts this one: {_LOCKED_OUT}"]


def _new_secret() -> str:
    return f"mkv_{secrets.token_hex(32)}"


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("ascii")).hexdigest()


def _valid(key: AccessKey) -> AccessKey:
    if key.status == "valid":
        return key
    raise AuthenticationError(f"the access key {key.prefix}... is {key.status}", hint="ask for a new one")


def _checked(new: rows.NewAccessKey) -> rows.NewAccessKey:
    if new.collections is None:
        return new
    if new.scope == "admin":
        raise BadRequestError(
            "a key of scope admin is for every collection",
            hint="leave the collections out, or make it a new key of scope read or write",
        )
    return replace(new, collections=tuple(sorted(set(new.collections))))


def _expiry(seconds: int) -> datetime | None:
    return now() + timedelta(seconds=seconds) if seconds else None
