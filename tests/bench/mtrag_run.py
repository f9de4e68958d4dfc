"""The whole way on real documents and questions, kept: not part of the suite, it takes long.

    MEMKV_TEST_DATA=/path/to/data python tests/bench/mtrag_run.py

All distinct contexts of the MTRAG tasks are ingested as documents; recall@5 of the gold contexts is taken
over every question; twenty questions are answered with citations that point into what was retrieved; a
second ingest prefills nothing. The figures are written to tests/bench/results/mtrag-smollm2.json; questions,
answers and quotes, which are the data set's, are printed only.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memkv.config import load_config
from memkv.engine.environment import cpu_name, threads, versions
from memkv.memory import Memory
from memkv.wire import (
    CollectionCreate,
    DocumentCreate,
    Generation,
    Job,
    QueryRequest,
    QueryResponse,
    SearchRequest,
)

sys.path.insert(0, str(Path(__file__).parent))
from sources import ROOT, sources_digest

RESULT = ROOT / "tests" / "bench" / "results" / "mtrag-smollm2.json"
COLLECTION = "mtrag"
ANSWERED = 20
TOP_K = 5
_BATCH = 64  # documents in one job


@dataclass(frozen=True, slots=True)
class Task:
    """Attributes:
    gold: external ids of the contexts that the task came with.
    """

    question: str
    gold: frozenset[str]


def read_tasks(path: Path) -> tuple[list[Task], list[DocumentCreate]]:
    """The tasks, and every distinct context once, named by its document and its place among those."""
    tasks: list[Task] = []
    names: dict[str, str] = {}  # text -> external id
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for context in row["contexts"]:
            text = context["text"]
            names.setdefault(text, f"{context['document_id']}#{len(names)}")
        gold = frozenset(names[context["text"]] for context in row["contexts"])
        tasks.append(Task(row["question"], gold))
    return tasks, [DocumentCreate(text=text, external_id=name) for text, name in names.items()]


def ingest(memory: Memory, documents: Sequence[DocumentCreate]) -> dict[str, Any]:
    """Everything, job after job; what the jobs counted, and how long it took."""
    started = time.perf_counter()
    jobs: list[Job] = []
    for start in range(0, len(documents), _BATCH):
        job = memory.ingest(COLLECTION, documents[start : start + _BATCH]).job
        if job is not None:
            jobs.append(memory.wait_job(job.id, timeout=None))
            print(f"{start + _BATCH} documents, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    seconds = time.perf_counter() - started
    assert {job.status for job in jobs} <= {"succeeded"}, [job.errors for job in jobs]
    tokens = sum(job.counts.tokens_prefilled for job in jobs)
    return {
        "documents": sum(job.counts.documents for job in jobs),
        "chunks": sum(job.counts.chunks for job in jobs),
        "tokens_prefilled": tokens,
        "kv_bytes": sum(job.counts.kv_bytes_written for job in jobs),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
    }


def recall(memory: Memory, tasks: Sequence[Task]) -> dict[str, float]:
    """Share of the gold contexts among the documents of the first five chunks; mean over the questions."""
    found = []
    for task in tasks:
        hits = memory.search(
            SearchRequest(query=task.question, collection=COLLECTION, top_k=TOP_K, min_score=-1.0)
        )
        names = {hit.external_id for hit in hits.data}
        found.append((len(task.gold & names) / len(task.gold), bool(task.gold & names)))
    return {
        "questions": len(tasks),
        f"recall_at_{TOP_K}": statistics.mean(share for share, _ in found),
        f"any_gold_at_{TOP_K}": statistics.mean(hit for _, hit in found),
    }


def answers(memory: Memory, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
    """Each answer with its sources, every quote checked against the chunk that it is said to be from."""
    for task in tasks:
        response = memory.query(
            QueryRequest(
                query=task.question,
                collection=COLLECTION,
                top_k=TOP_K,
                generation=Generation(max_tokens=64),
            )
        )
        quotes = list(_quotes(response))
        print(f"{task.question}\n  {response.answer}\n  {len(quotes)} quotes", file=sys.stderr)
        yield {
            "quotes": len(quotes),
            "cited_gold": any(quote["external_id"] in task.gold for quote in quotes),
            "prompt_tokens": response.usage.prompt_tokens,
            "cached_tokens": response.usage.cached_tokens,
            "prefilled_tokens": response.usage.prefilled_tokens,
            "ttft_ms": response.timings.ttft_ms,
        }


def _quotes(response: QueryResponse) -> Iterator[dict[str, str]]:
    retrieved = {chunk.chunk_id: chunk for chunk in response.chunks}
    for citation in response.citations:
        assert response.answer[citation.start : citation.end] == citation.text
        for source in citation.sources:
            chunk = retrieved[source.chunk_id]  # a citation points into what was retrieved, or this fails
            quote = chunk.text[source.quote.start : source.quote.end]
            assert quote, "an empty quote"
            yield {"sentence": citation.text, "external_id": chunk.external_id, "quote": quote}


def main() -> None:
    sources = sources_digest()
    tasks, documents = read_tasks(Path(os.environ["MEMKV_TEST_DATA"]) / "mtrag" / "tasks.jsonl")
    with tempfile.TemporaryDirectory(prefix="memkv-mtrag-") as directory:
        config = load_config({"store.data_dir": directory}, env={})
        with Memory.open(config) as memory:
            memory.create_collection(CollectionCreate(name=COLLECTION))
            first = ingest(memory, documents)
            second = ingest(memory, documents)
            assert second["tokens_prefilled"] == 0
            found = recall(memory, tasks)
            answered = list(answers(memory, tasks[:: len(tasks) // ANSWERED][:ANSWERED]))
    result = {
        "model": config.model.model,
        "embedder": config.model.embedder,
        "documents": len(documents),
        "ingest": first,
        "second_ingest": second,
        "retrieval": found,
        "answered": len(answered),
        "answers_with_citations": sum(bool(answer["quotes"]) for answer in answered),
        "answers_that_cite_gold": sum(answer["cited_gold"] for answer in answered),
        "answers": answered,
        "versions": versions(),
        "threads": threads(),
        "cpu": cpu_name(),
        "sources": sources,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "answers"}, indent=2))


if __name__ == "__main__":
    main()
