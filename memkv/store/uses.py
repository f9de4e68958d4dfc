"""How often chunks were mapped for a question: counted in memory, written now and then, lost at most once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from memkv.store.catalog import Catalog


class Uses:
    """Thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._guard = threading.Lock()
        self._counted: Counter[tuple[str, str]] = Counter()  # since the last flush

    def note(self, tenant: str, input_keys: Iterable[str]) -> None:
        """Each of these was mapped once more."""
        with self._guard:
            self._counted.update((tenant, key) for key in input_keys)

    def count(self, tenant: str, input_key: str) -> int:
        """How often a key was used so far. Raises DatabaseUnavailable, DatabaseDamaged."""
        with self._guard:
            recent = self._counted[tenant, input_key]
        return recent + self._catalog.uses_of(input_key)

    def flush(self) -> None:
        """Writes what was counted. Raises as every write to the database; nothing is lost then."""
        with self._guard:
            counted, self._counted = self._counted, Counter()
        if not counted:
            return
        written = False
        try:
            self._catalog.add_uses(counted)
            written = True
        finally:
            if not written:
                with self._guard:
                    self._counted.update(counted)
