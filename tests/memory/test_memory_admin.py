"""Keeping a store through a `Memory`: checks as jobs, KV made again, and what works without any model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memkv.config import load_config
from memkv.errors import (
    BadRequestError,
    CollectionNotFound,
    ConflictError,
    DatabaseDamaged,
    FingerprintMismatch,
    StoreLocked,
)
from memkv.memory import Memory, StoredMemory
from memkv.wire import (
    ChangeWork,
    CollectionCreate,
    DocumentCreate,
    Generation,
    Job,
    PageRequest,
    QueryRequest,
    SnapshotWork,
    StoreCollection,
    StoreEvict,
    StoreGC,
    StoreVerification,
    StoreVerify,
    StoreWork,
)

OpenMemory = Callable[..., Memory]

TEXT = "\n\n".join(f"Entry {i}: the gauge of the tank read {i * 37 % 100} on day {i}." for i in range(12))


def filled(memory: Memory, name: str = "c", **settings: object) -> Memory:
    memory.create_collection(CollectionCreate(name=name, chunk_tokens=64, **settings))  # type: ignore[arg-type]
    ingested = memory.ingest(name, [DocumentCreate(text=TEXT, external_id="a")], wait=60)
    assert ingested.documents[0].status == "ready"
    return memory


def done(memory: StoredMemory, work: StoreWork | ChangeWork | SnapshotWork) -> Job:
    assert work.job is not None
    job = memory.wait_job(work.job.id, 60)
    assert job.status == "succeeded", job
    return job


def verified(memory: StoredMemory, **wanted: object) -> StoreVerification:
    job = done(memory, memory.admin.verify(StoreVerify(**wanted)))  # type: ignore[arg-type]
    assert job.verification is not None
    return job.verification


def answer(memory: Memory, name: str = "c") -> tuple[str, int]:
    """An answer, and how many chunks had to be prefilled for it."""
    response = memory.query(
        QueryRequest(
            query="What did the gauge read?",
            collection=name,
            policy="map",
            generation=Generation(max_tokens=4),
        )
    )
    return response.answer, response.reuse.healed_chunks


def block_files(memory: StoredMemory) -> list[Path]:
    return sorted((Path(memory.store_stats().data_dir) / "blocks").glob("*/*.kv"))


def test_a_check_is_a_job_and_tells_what_it_found(open_memory: OpenMemory) -> None:
    memory = filled(open_memory())
    files = block_files(memory)
    plan = memory.admin.verify(StoreVerify(dry_run=True))
    assert (plan.files, plan.job) == (len(files), None)
    assert plan.bytes == sum(file.stat().st_size for file in files)
    sound = verified(memory)
    assert (sound.found, sound.problems, sound.kv_files) == (0, [], len(files))
    files[0].chmod(0o600)
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"?")
    files[0].chmod(0o400)
    assert verified(memory, full=False).found == 0
    broken = verified(memory)
    assert [(p.kind, p.name, p.repaired) for p in broken.problems] == [("digest", files[0].name, False)]
    mended = verified(memory, repair=True)
    assert (mended.found, mended.repaired) == (1, 1)
    assert verified(memory).found == 0
    assert [file.kind for file in memory.admin.quarantine().files] == ["digest"]


def test_a_check_with_little_time_says_how_far_it_came(open_memory: OpenMemory) -> None:
    memory = filled(open_memory())
    files = block_files(memory)
    first = verified(memory, max_seconds=1e-9, deep=1000)
    assert (first.files, first.files_left, first.recomputed) == (1, len(files) - 1, 0)
    assert first.bytes + first.bytes_left == first.kv_bytes == sum(file.stat().st_size for file in files)
    whole = verified(memory, max_seconds=600, deep=1)
    assert (whole.files, whole.files_left, whole.bytes_left, whole.recomputed) == (len(files), 0, 0, 1)
    with pytest.raises(BadRequestError, match="a quick check reads none"):
        memory.admin.verify(StoreVerify(full=False, max_seconds=1))


def test_work_tells_bytes_before_and_after(open_memory: OpenMemory) -> None:
    """What lies under blocks/, indexes/ and quarantine/, looked at from outside."""
    memory = filled(open_memory())

    def on_disk() -> int:
        root = Path(memory.store_stats().data_dir)
        return sum(
            path.stat().st_size
            for name in ("blocks", "indexes", "quarantine")
            for path in (root / name).rglob("*")
            if path.is_file()
        )

    whole = on_disk()
    done(memory, memory.admin.evict(StoreEvict(collection="c")))
    less = on_disk()
    plan = memory.reprefill(StoreCollection(collection="c", dry_run=True))
    assert (plan.bytes_before, plan.bytes_after) == (less, whole) == (less, less + plan.bytes)
    made = done(memory, memory.reprefill(StoreCollection(collection="c"))).counts
    assert (made.bytes_before, made.bytes_after) == (less, whole)
    assert whole > less
    warmed = done(memory, memory.admin.warm(StoreCollection(collection="c"))).counts
    assert (warmed.bytes_before, warmed.bytes_after) == (whole, whole)

    stray = Path(memory.store_stats().data_dir) / "blocks" / "00" / f"{'0' * 64}.{'0' * 32}.kv"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"x" * 1000)
    dry = memory.admin.verify(StoreVerify(repair=True, dry_run=True))
    assert (dry.bytes_before, dry.bytes_after) == (whole + 1000, whole)
    looked = memory.admin.verify(StoreVerify(dry_run=True))
    assert (looked.bytes_before, looked.bytes_after) == (whole + 1000, whole + 1000)
    swept = verified(memory, repair=True)
    assert (swept.bytes_before, swept.bytes_after) == (whole + 1000, whole)
    ingested = memory.ingest("c", [DocumentCreate(text="Another.", external_id="b")], wait=60)
    assert ingested.job is not None
    assert (ingested.job.counts.bytes_before, ingested.job.counts.bytes_after) == (0, 0), "it is not asked"


def test_chunks_are_prefilled_again_and_compared(open_memory: OpenMemory) -> None:
    """KV that is sound by every checksum, and not what the model makes of the tokens."""
    memory = filled(open_memory())
    files = len(block_files(memory)) - 1  # the prefix is not compared
    found = verified(memory, deep=1000)
    assert (found.found, found.recomputed) == (0, files)
    opened = memory._collections.by_name("default", "c")
    [row, *_] = memory._store.catalog.files_of(opened.row.id)
    row = next(
        r for r in memory._store.catalog.files_of(opened.row.id) if r.input_key != opened.row.prefix_key
    )
    chunk = memory._store.catalog.chunk_of_key("default", row.input_key)
    ref = opened.ref(row.input_key, chunk.token_ids)
    kv = opened.kv.read(ref)
    assert kv is not None
    other = type(kv)(kv.layout, kv.num_tokens, bytes(len(kv.data)))
    done(memory, memory.admin.evict(StoreEvict(collection="c")))
    opened.kv.publish([(ref, other)])
    wrong = verified(memory, deep=1000)
    assert [problem.kind for problem in wrong.problems] == ["recomputed"]
    assert verified(memory, deep=1000, repair=True).repaired == 1
    assert verified(memory, deep=1000).found == 0


def test_what_was_evicted_is_made_again(open_memory: OpenMemory) -> None:
    memory = filled(open_memory())
    before = answer(memory)
    files = len(block_files(memory))
    evicted = done(memory, memory.admin.evict(StoreEvict(collection="c"))).change
    assert evicted is not None
    assert evicted.files == files - 1, "the prefix stays"
    assert evicted.bytes_after < evicted.bytes_before
    plan = memory.reprefill(StoreCollection(collection="c", dry_run=True))
    assert (plan.files, plan.job) == (files - 1, None)
    assert len(block_files(memory)) == 1
    job = done(memory, memory.reprefill(StoreCollection(collection="c")))
    assert job.kind == "reprefill"
    assert (job.counts.documents, job.counts.chunks_prefilled) == (1, files - 1)
    assert len(block_files(memory)) == files
    assert memory.reprefill(StoreCollection(collection="c")).job is None, "nothing is lacking"
    assert answer(memory) == before
    assert memory.verify_store().found == 0


def test_reprefill_makes_what_was_lazy(open_memory: OpenMemory) -> None:
    memory = filled(open_memory(), prefill="on_first_use")
    assert block_files(memory) == []
    work = memory.reprefill(StoreCollection(collection="c"))
    done(memory, work)
    assert len(block_files(memory)) == work.files + 1
    assert answer(memory)[1] == 0


def test_a_collection_of_another_model_is_made_anew(
    open_memory: OpenMemory, tiny_model_dir: Callable[[str], Path]
) -> None:
    memory = filled(open_memory())
    old = {file.name for file in block_files(memory)}
    assert memory.store_stats().stale == []
    memory.close()
    memory = open_memory(model__model=str(tiny_model_dir("qwen3")))
    assert memory.store_stats().stale == ["c"]
    with pytest.raises(FingerprintMismatch) as caught:
        answer(memory)
    assert "memkv store reprefill c" in caught.value.hint
    plan = memory.reprefill(StoreCollection(collection="c", dry_run=True))
    assert plan.files == len(old) - 1
    assert memory.store_stats().stale == ["c"], "a dry run changed it"
    done(memory, memory.reprefill(StoreCollection(collection="c")))
    assert memory.store_stats().stale == []
    assert old.isdisjoint(file.name for file in block_files(memory)), "KV of the old model was left"
    assert memory.get_document("c", "a").status == "ready"
    assert answer(memory)[1] == 0
    assert verified(memory, deep=10).found == 0


def test_warming_reads_what_a_collection_needs(open_memory: OpenMemory) -> None:
    memory = filled(open_memory())
    files = block_files(memory)
    plan = memory.admin.warm(StoreCollection(collection="c", dry_run=True))
    assert (plan.files, plan.job) == (len(files), None)
    job = done(memory, memory.admin.warm(StoreCollection(collection="c")))
    assert (job.counts.chunks, job.progress.done) == (len(files), len(files))
    with pytest.raises(CollectionNotFound):
        memory.admin.warm(StoreCollection(collection="nothing"))


def test_uses_are_counted_by_questions(open_memory: OpenMemory) -> None:
    memory = filled(open_memory())
    answer(memory)
    memory._store.uses.flush()
    found = memory.admin.files(PageRequest(limit=100)).data
    assert sum(file.uses for file in found) == 4, "the four chunks that were mapped"
    assert {file.collection for file in found} == {"c"}
    used = next(file for file in found if file.uses)
    assert used.used_at
    shown = memory.admin.file(used.key[:12])
    assert shown.file == used
    assert [(r.collection, r.external_id) for r in shown.references] == [("c", "a")]
    assert shown.damage is None


def test_a_store_is_kept_without_any_model(open_memory: OpenMemory, tmp_path: Path) -> None:
    memory = filled(open_memory())
    filled(memory, "other")
    chunks = memory.get_collection("c").counts.chunks
    config = memory._config
    with pytest.raises(StoreLocked):
        StoredMemory.open_store(config)
    memory.close()
    with StoredMemory.open_store(config) as stored:
        assert [c.name for c in stored.list_collections(PageRequest()).data] == ["c", "other"]
        assert stored.get_collection("c").model == memory._parts.model.name
        assert stored.get_document("c", "a").chunks == chunks
        assert {job.status for job in stored.list_jobs(PageRequest()).data} == {"succeeded"}
        assert verified(stored).found == 0
        stored.forget("c", "a")
        stored.delete_collection("other")
        swept = done(stored, stored.admin.gc(StoreGC())).change
        assert swept is not None
        assert swept.files == 0, "deletion left something"
        assert stored.store_stats().pool == {}
        work = stored.admin.verify(StoreVerify(deep=3))
        assert work.job is not None
        job = stored.wait_job(work.job.id, 60)
        assert (job.status, job.errors[0].code) == ("failed", ConflictError.code)


def test_without_a_model_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from memkv.config import load_config; from memkv.memory import StoredMemory; "
        f"config = load_config({{'store.data_dir': {str(tmp_path / 'data')!r}}}, env={{}}); "
        "StoredMemory.open_store(config).close(); "
        "sys.exit(bool({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_check_that_a_stop_interrupts_goes_on_at_the_next_start(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = filled(open_memory())
    monkeypatch.setattr(memory._maintenance, "_run", lambda job: (_ for _ in ()).throw(_stopped()))
    work = memory.admin.verify(StoreVerify())
    memory._maintenance._thread.join(10)
    assert not memory._maintenance.is_alive
    assert memory.ready().checks["maintenance"].ok is False
    memory.close()
    again = open_memory()
    job = done(again, work)
    assert (job.attempts, job.verification is not None) == (1, True)


def _stopped() -> BaseException:
    from memkv.memory.job_thread import _Stopped

    return _Stopped()


def test_load_config_takes_the_scrubbers_keys() -> None:
    config = load_config({"store.scrub_hours": "0", "store.scrub_rate_bytes": "5M"}, env={})
    assert (config.store.scrub_hours, config.store.scrub_rate_bytes) == (0, 5_000_000)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (DatabaseDamaged("a page is torn", hint="restore"), "database_damaged"),
        (OSError("x"), "internal_error"),
    ],
)
def test_whoever_waits_for_a_check_is_told_that_it_failed(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch, fault: Exception, code: str
) -> None:
    memory = filled(open_memory())

    def fail(*_: object, **__: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(memory._store, "verify_until", fail)
        work = memory.admin.verify(StoreVerify())
        assert work.job is not None
        job = memory.wait_job(work.job.id, 30)
    assert (job.status, job.errors[0].code) == ("failed", code)
    assert verified(memory).found == 0, "the thread goes on"
