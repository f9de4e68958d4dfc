"""What reuse costs a model, kept on both databases."""

from __future__ import annotations

from memkv.store import Store
from memkv.store.rows import GateRow

MAP = GateRow("needle", "map", 200, 0.0, 0.7, 0.9)
SELECT = GateRow("needle", "select:0.2", 200, 0.2, 0.08, 0.9)


def test_gates_are_kept_by_model_and_data(store: Store) -> None:
    catalog = store.catalog
    assert catalog.gates("model a") == []
    catalog.put_gates("model a", "tasks.jsonl", [SELECT, MAP])
    catalog.put_gates("model b", "tasks.jsonl", [MAP])
    assert catalog.gates("model a") == [MAP, SELECT]
    catalog.put_gates("model a", "other.jsonl", [MAP])
    assert catalog.gates("model a") == [MAP, MAP, SELECT]


def test_a_new_measurement_replaces_the_old_one_whole(store: Store) -> None:
    store.catalog.put_gates("model", "tasks.jsonl", [MAP, SELECT])
    store.catalog.put_gates("model", "tasks.jsonl", [MAP])
    assert store.catalog.gates("model") == [MAP]
    store.catalog.put_gates("model", "tasks.jsonl", [])
    assert store.catalog.gates("model") == []
