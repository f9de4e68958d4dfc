"""What the parts of the catalog have in common."""

from __future__ import annotations

from memkv.store.database import Database


class Statements:
    """Raises DatabaseUnavailable, DatabaseDamaged; writing also InsufficientStorageError, StoreFenced."""

    def __init__(self, database: Database) -> None:
        self._database = database
