"""What reuse costs a model, kept on both databases."""

from __future__ import annotations

from dataclasses import replace

from memkv.store import Store
from memkv.store.rows import GateRow

MAP = GateRow("tasks.jsonl", 256, 4096, "needle", "map", 200, 0.0, 0.7, 0.9)
SELECT = replace(MAP, policy="select:0.2", fresh=0.2, dnll_high=0.08)
OTHER = replace(MAP, data="other.jsonl")
SMALL = replace(MAP, chunk_tokens=64)
SHORT = replace(MAP, length=512)


def test_gates_are_kept_by_fingerprint_data_and_form(store: Store) -> None:
    catalog = store.catalog
    assert catalog.gates("one") == []
    catalog.put_gates("one", [SELECT, MAP])
    catalog.put_gates("two", [MAP])
    assert catalog.gates("one") == [MAP, SELECT]
    catalog.put_gates("one", [OTHER])
    catalog.put_gates("one", [SMALL])
    catalog.put_gates("one", [SHORT])
    assert catalog.gates("one") == [OTHER, SMALL, SHORT, MAP, SELECT]


def test_a_new_measurement_replaces_the_old_one_whole(store: Store) -> None:
    store.catalog.put_gates("one", [MAP, SELECT, SMALL])
    store.catalog.put_gates("one", [MAP])
    assert store.catalog.gates("one") == [SMALL, MAP]


def test_what_is_dropped_is_dropped_of_one_fingerprint(store: Store) -> None:
    for digest in ("one", "two"):
        store.catalog.put_gates(digest, [MAP, OTHER, SMALL])
    store.catalog.drop_gates("one")
    assert store.catalog.gates("one") == []
    assert len(store.catalog.gates("two")) == 3
