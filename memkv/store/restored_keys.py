"""Access keys outlive a database that a snapshot takes the place of: what was revoked since stays revoked.

Before the database is replaced they are put aside in `restored-keys` of the data directory, and the next
opening takes them back: a kill in between loses nothing.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path

import msgspec

from memkv.errors import ConfigError, DatabaseDamaged, DatabaseUnavailable
from memkv.store.catalog_keys import KeyStatements
from memkv.store.database import Database
from memkv.store.durable_files import Damage, read_file, replace_file, sync_directory
from memkv.store.rows import KeptKey
from memkv.store.schema import schema_revision


def put_keys_aside(database: Database, data_dir: Path) -> None:
    """Those of a database that is about to go, if it can be read. Raises InsufficientStorageError."""
    path = kept_keys_path(data_dir)
    if path.exists():  # since a restoration that no opening followed: newer than what the database holds
        return
    kept: list[KeptKey] = []
    with suppress(DatabaseUnavailable, DatabaseDamaged):
        if schema_revision(database).is_current:
            kept = KeyStatements(database).kept_keys()
    if kept:
        replace_file(path, data_dir / "tmp" / uuid.uuid4().hex, [msgspec.json.encode(kept)])


def take_keys_back(database: Database, data_dir: Path) -> None:
    """Where some were put aside, the database has these and no others from now on. Raises ConfigError."""
    path = kept_keys_path(data_dir)
    if not path.exists():
        return
    data = read_file(path)
    try:
        kept = None if isinstance(data, Damage) else msgspec.json.decode(data, type=list[KeptKey])
    except msgspec.MsgspecError:
        kept = None
    if kept is None:
        raise ConfigError(
            f"{path} cannot be read: the access keys that a restoration kept",
            hint="remove it to go on with those of the snapshot, and revoke those that are to go",
        )
    KeyStatements(database).replace_keys(kept)
    path.unlink()
    sync_directory(data_dir)


def kept_keys_path(data_dir: Path) -> Path:
    return data_dir / "restored-keys"
