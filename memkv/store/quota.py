"""How much KV may lie on disk: caps of the store, of a tenant and of a collection.

A publication claims its bytes before it writes them, and until its rows count them: however many threads
publish, no cap is passed.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from memkv.errors import InsufficientStorageError
from memkv.store.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Caps:
    """Bytes of block files; 0: no cap. A collection's own stands in its row."""

    store: int = 0
    tenant: int = 0  # of each


NO_CAPS = Caps()


@dataclass(frozen=True, slots=True)
class Claim:
    """Bytes that are about to be written for a collection."""

    tenant: str
    collection_id: str
    num_bytes: int


class Quota:
    """Thread-safe. Raises DatabaseUnavailable, DatabaseDamaged."""

    def __init__(self, catalog: Catalog, caps: Caps) -> None:
        self._catalog = catalog
        self._caps = caps
        self._guard = threading.Lock()
        self._claimed: Counter[tuple[str, str]] = Counter()  # (tenant, collection id) -> bytes under way

    @contextmanager
    def claim(self, claims: Sequence[Claim]) -> Iterator[None]:
        """Holds the bytes while the block runs. Raises InsufficientStorageError where a cap is too low."""
        wanted: Counter[tuple[str, str]] = Counter()
        for claim in claims:
            wanted[claim.tenant, claim.collection_id] += claim.num_bytes
        with self._guard:
            for (tenant, collection_id), num_bytes in wanted.items():
                self._require(tenant, collection_id, num_bytes, wanted)
            self._claimed.update(wanted)
        try:
            yield
        finally:
            with self._guard:
                self._claimed.subtract(wanted)
                self._claimed += Counter()  # forgets those that are zero

    def require(self, tenant: str, collection_id: str, num_bytes: int) -> None:
        """Raises InsufficientStorageError where so much KV more does not fit below the caps."""
        with self._guard:
            wanted = Counter({(tenant, collection_id): num_bytes})
            self._require(tenant, collection_id, num_bytes, wanted)

    def room(self, tenant: str, collection_id: str) -> float:
        """Bytes that a collection may still take; infinite where there is no cap."""
        with self._guard:
            return min((cap - used for _, cap, used in self._levels(tenant, collection_id)), default=math.inf)

    def _require(
        self, tenant: str, collection_id: str, num_bytes: int, wanted: Counter[tuple[str, str]]
    ) -> None:
        for name, cap, used in self._levels(tenant, collection_id):
            more = {
                "store": sum(wanted.values()),
                "tenant": sum(count for (owner, _), count in wanted.items() if owner == tenant),
            }.get(name, num_bytes)
            if used + more > cap:
                raise InsufficientStorageError(
                    f"{more:,} bytes of KV do not fit: the {name} holds {used:,} of at most {cap:,}",
                    hint=f"delete documents, make room with memkv store evict, or raise {_KEYS[name]}",
                )

    def _levels(self, tenant: str, collection_id: str) -> list[tuple[str, int, int]]:
        """(name, cap, bytes used or claimed) of each cap that there is."""
        found = []
        if self._caps.store:
            used = self._catalog.kv_bytes() + sum(self._claimed.values())
            found.append(("store", self._caps.store, used))
        if self._caps.tenant:
            claimed = sum(count for (owner, _), count in self._claimed.items() if owner == tenant)
            found.append(("tenant", self._caps.tenant, self._catalog.kv_bytes(tenant=tenant) + claimed))
        cap = self._catalog.collection_cap(collection_id)
        if cap:
            used = self._catalog.kv_bytes(collection_id=collection_id) + self._claimed[tenant, collection_id]
            found.append(("collection", cap, used))
        return found


_KEYS = {
    "store": "store.max_kv_bytes",
    "tenant": "store.max_tenant_kv_bytes",
    "collection": "its cap with memkv collections update --max-kv",
}
