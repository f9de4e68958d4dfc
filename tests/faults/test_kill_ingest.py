"""kill -9 at six points of an ingest, each on the store that the kills before it left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fault_process import SIGKILLED, Nursery

from memkv.config import load_config
from memkv.memory import Memory
from memkv.wire import DocumentCreate, Generation, PageRequest, QueryRequest


def run(nursery: Nursery, flags: dict[str, object], kill_at: int, said: Path) -> tuple[int, list[str]]:
    """The exit status, and what was acknowledged in this round, which is named by the file `said`."""
    status = nursery.run("ingest_worker:work", flags=flags, kill_at=kill_at, round_=said.name, said=str(said))
    return status, said.read_text().splitlines() if said.exists() else []


def test_six_kills_lose_no_acknowledged_document(
    tmp_path: Path, minilm: Path, tiny_model_dir: Callable[[str], Path]
) -> None:
    flags: dict[str, object] = {
        "store.data_dir": str(tmp_path / "data"),
        "model.model": str(tiny_model_dir("llama")),
        "model.embedder": str(minilm),
        "engine.pool_bytes": "64M",
        "engine.threads": 1,
    }
    with Nursery(tmp_path / "processes") as nursery:
        status, said = run(nursery, flags, 0, tmp_path / "whole")
        assert status == 0, nursery.last_words()
        steps = int(said[-1].removeprefix("steps "))
        assert steps > 30, "an ingest of three documents changes more than this"
        acknowledged = {line.split()[1] for line in said if line.startswith("accepted")}
        for kill in range(6):
            status, said = run(nursery, flags, 1 + kill * (steps - 1) // 6, tmp_path / f"kill{kill}")
            assert status == SIGKILLED, nursery.last_words()
            acknowledged |= {line.split()[1] for line in said if line.startswith("accepted")}
            with Memory.open(load_config(flags, env={})) as memory:
                check(memory, acknowledged, f"kill{kill}-0")


def check(memory: Memory, acknowledged: set[str], retried: str) -> None:
    """Nothing is missing, no row lacks its file, the retry ends, and the store answers."""
    assert not [p for p in memory.verify_store(full=True).problems if p.kind != "orphan"]
    text = "\n\n".join(f"Entry {i} of {retried}: the gauge read {i * 37 % 100}." for i in range(8))
    accepted = memory.ingest("c", [DocumentCreate(text=text, external_id=retried)], wait=60)
    assert accepted.documents[0].status == "ready"
    acknowledged.add(retried)
    for status in ("queued", "running"):  # accepted before the kill: their jobs go on by themselves
        for job in memory.list_jobs(PageRequest(limit=100), status=status).data:
            memory.wait_job(job.id, 60)
    assert {memory.get_document("c", name).status for name in acknowledged} == {"ready"}
    answer = memory.query(
        QueryRequest(
            query=f"What did the gauge read in entry 3 of {retried}?",
            collection="c",
            policy="map",
            generation=Generation(max_tokens=2),
        )
    )
    assert answer.chunks
    assert answer.reuse.healed_chunks == 0
