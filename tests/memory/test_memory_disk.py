"""A full disk: what asks for no room is answered."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_disk import fill, resize, small_disk

from memkv.errors import InsufficientStorageError
from memkv.wire import CollectionCreate, DocumentCreate, QueryRequest, SearchRequest

__all__ = ["small_disk"]


def test_a_question_is_answered_on_a_full_disk(small_disk: Path, open_memory) -> None:
    resize(small_disk, 64 << 20)
    directory = str(small_disk / "data")
    memory = open_memory(store__data_dir=directory)
    memory.create_collection(CollectionCreate(name="c"))
    memory.ingest("c", [DocumentCreate(text="The lamp is lit before sunset.")], wait=60)
    memory.close()
    for _ in range(2):
        fill(small_disk, "filler")
        memory = open_memory(store__data_dir=directory)
        assert memory.search(SearchRequest(query="lamp", collection="c")).data
        response = memory.query(QueryRequest(query="When is the lamp lit?", collection="c", policy="map"))
        assert response.chunks
        assert response.reuse.healed_chunks == 0
        memory.close()
    memory = open_memory(store__data_dir=directory)
    with pytest.raises(InsufficientStorageError) as caught:
        memory.ingest("c", [DocumentCreate(text=f"line {i}\n" * 400_000) for i in range(3)])
    assert caught.value.hint
