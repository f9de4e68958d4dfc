"""The kept run on real questions, at toy size: it counts right, and notices what it promises to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mtrag_run import COLLECTION, answers, ingest, read_tasks, recall

from memkv.config import load_config
from memkv.memory import Memory
from memkv.wire import CollectionCreate

TASKS = (
    ("When does the boat come?", ["The supply boat comes every second Tuesday.", "The lamp is white."]),
    ("What colour is the lamp?", ["The lamp is white."]),
)


@pytest.fixture
def tasks_file(tmp_path: Path) -> Path:
    rows = [
        {
            "question": question,
            "contexts": [{"document_id": f"d{i}", "text": text} for i, text in enumerate(texts)],
        }
        for question, texts in TASKS
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def memory(tmp_path: Path, minilm: Path, tiny_model_dir: Callable[[str], Path]) -> Iterator[Memory]:
    flags = {
        "store.data_dir": str(tmp_path / "data"),
        "model.model": str(tiny_model_dir("llama")),
        "model.embedder": str(minilm),
        "engine.pool_bytes": "64M",
        "engine.threads": 1,
    }
    with Memory.open(load_config(flags, env={})) as memory:
        memory.create_collection(CollectionCreate(name=COLLECTION))
        yield memory


def test_contexts_become_documents_once(tasks_file: Path) -> None:
    tasks, documents = read_tasks(tasks_file)
    assert [document.text for document in documents] == list(TASKS[0][1])
    assert len({document.external_id for document in documents}) == 2
    assert tasks[1].gold < tasks[0].gold


def test_the_run_at_toy_size(memory: Memory, tasks_file: Path) -> None:
    tasks, documents = read_tasks(tasks_file)
    first, second = ingest(memory, documents), ingest(memory, documents)
    assert (first["documents"], second["documents"]) == (2, 0)
    assert first["tokens_prefilled"] > 0
    assert second["tokens_prefilled"] == 0
    assert recall(memory, tasks)["recall_at_5"] == 1.0
    answered = list(answers(memory, tasks))
    assert len(answered) == len(tasks)
    for answer in answered:
        assert answer["cached_tokens"] + answer["prefilled_tokens"] == answer["prompt_tokens"]
        assert answer["cited_gold"] <= (answer["quotes"] > 0)


def test_the_real_tasks_can_be_read(real_data: Path) -> None:
    tasks, documents = read_tasks(real_data / "mtrag" / "tasks.jsonl")
    assert len(tasks) == 196
    assert len(documents) == 595
