"""Memories over real stores: a tiny random model for the bookkeeping, SmolLM2 for answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memkv.config import load_config
from memkv.memory import Memory

OpenMemory = Callable[..., Memory]

LIGHTHOUSE = """# The Skerry lighthouse

The Skerry lighthouse was lit for the first time in 1874. Its lamp burns whale oil and later paraffin.
The tower is 31 metres high and stands on a rock that the sea covers twice a day.

Keeper Ada Brandt recorded the great storm of 1893. The storm broke eleven panes of the lantern, and the
keepers held the light with blankets and tar paper until the morning.

The supply boat Petrel comes every second Tuesday. It carries coal, flour and letters, and takes the
keepers' reports back to the harbour office in Vik.
"""

RAILWAY = """# The Hollin valley railway

The Hollin valley railway is a narrow-gauge line of 14 kilometres. Its engines are named after birds: Heron,
Wren and Dipper. Heron is the oldest and was built in 1902.

Trains carry slate from the quarry at Crag End to the canal basin. A loaded train may not exceed 12 kilometres
an hour on the Foxhole incline.
"""


@pytest.fixture
def open_memory(tmp_path: Path, minilm: Path, tiny_model_dir: Callable[[str], Path]) -> Iterator[OpenMemory]:
    """Opens memories on `tmp_path` with the tiny Llama; flags as `section__key`. Closed at the end."""
    opened: list[Memory] = []

    def open_(**flags: object) -> Memory:
        values: dict[str, object] = {
            "store.data_dir": str(tmp_path / "data"),
            "model.model": str(tiny_model_dir("llama")),
            "model.embedder": str(minilm),
            "engine.pool_bytes": "64M",
            "engine.host_share": 0.0,
            "engine.threads": 1,
        }
        values.update({key.replace("__", "."): value for key, value in flags.items()})
        memory = Memory.open(load_config(values, env={}))
        opened.append(memory)
        return memory

    yield open_
    for memory in opened:
        memory.close()


@pytest.fixture(scope="module")
def smol_memory(tmp_path_factory: pytest.TempPathFactory, smollm2: Path, minilm: Path) -> Iterator[Memory]:
    """SmolLM2 with float32 KV, and the collection `library` with the two documents above."""
    from memkv.wire import CollectionCreate, DocumentCreate

    config = load_config(
        {
            "store.data_dir": str(tmp_path_factory.mktemp("smol")),
            "model.model": str(smollm2),
            "model.embedder": str(minilm),
            "kv.dtype": "float32",
            "engine.pool_bytes": "1G",
            "engine.host_share": 0.0,
        },
        env={},
    )
    with Memory.open(config) as memory:
        memory.create_collection(CollectionCreate(name="library", chunk_tokens=96))
        memory.ingest(
            "library",
            [
                DocumentCreate(text=LIGHTHOUSE, external_id="lighthouse"),
                DocumentCreate(text=RAILWAY, external_id="railway", metadata={"lang": "en", "year": 1902}),
            ],
            wait=120,
        )
        yield memory
