"""A document that takes the process down each time it is touched is given up alone, without any help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fault_process import SIGKILLED, Nursery

from memkv.config import load_config
from memkv.memory import StoredMemory
from memkv.store.catalog_jobs import MAX_ATTEMPTS
from memkv.store.rows import DEFAULT_TENANT, NewDocument
from memkv.wire import CollectionCreate, PageRequest


@pytest.mark.timeout(900)
def test_neighbours_of_a_poison_document_are_made_ready(
    tmp_path: Path, minilm: Path, tiny_model_dir: Callable[[str], Path]
) -> None:
    flags: dict[str, object] = {
        "store.data_dir": str(tmp_path / "data"),
        "model.model": str(tiny_model_dir("llama")),
        "model.embedder": str(minilm),
        "engine.pool_bytes": "64M",
        "engine.threads": 1,
    }
    accept(flags, ["before", "poison", "after"])
    statuses: list[int] = []
    with Nursery(tmp_path / "processes") as nursery:
        while len(statuses) <= MAX_ATTEMPTS and 0 not in statuses:
            statuses.append(nursery.run("poison_worker:work", flags=flags))
    assert statuses == [SIGKILLED] * MAX_ATTEMPTS + [0]
    with StoredMemory.open_store(load_config(flags, env={})) as memory:
        found = {d.external_id: d for d in memory.list_documents("c", PageRequest()).data}
        assert {name: d.status for name, d in found.items()} == {
            "before": "ready",
            "poison": "failed",
            "after": "ready",
        }
        assert found["poison"].error is not None
        assert found["poison"].error.code == "given_up"
        [job] = memory.list_jobs(PageRequest()).data
        assert job.status == "partial"
        assert memory.verify_store().found == 0


def accept(flags: dict[str, object], names: list[str]) -> None:
    """One job of these documents, with nothing done for it yet."""
    from memkv.memory import Memory

    config = load_config(flags, env={})
    with Memory.open(config) as memory:
        memory.create_collection(CollectionCreate(name="c", chunk_tokens=64))
    with StoredMemory.open_store(config) as stored:
        row = stored._store.catalog.get_collection(DEFAULT_TENANT, "c")
        new = [NewDocument(f"This is the text named {name}.", external_id=name) for name in names]
        stored._store.accept_documents(DEFAULT_TENANT, row.id, new)
