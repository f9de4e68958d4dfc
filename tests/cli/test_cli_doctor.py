"""`memkv doctor` on a store: what it finds there, and what `--fix` does about it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from memkv.cli import doctor_store
from memkv.config import load_config
from memkv.memory import Memory
from memkv.store import Store
from memkv.wire import CollectionCreate, DocumentCreate

TEXT = "# The light\n\nThe lamp of the tower is lit half an hour before sunset. It shows two flashes.\n"
WHERE = ("--data-dir", "data")


@dataclass
class Doctor:
    run: Run
    models: list[str]

    def __call__(self, *options: str) -> dict[str, dict[str, Any]]:
        """Findings by name; `mended` is what was done."""
        result = self.run("doctor", *options, *WHERE, *self.models, "--format", "json")
        told = json.loads(result.stdout)
        self.mended, self.stderr, self.exit_code = told["mended"], result.stderr, result.exit_code
        return {finding["name"]: finding for finding in told["findings"]}


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory, models: list[str]) -> Path:
    """A data directory with one collection, to be copied."""
    data = tmp_path_factory.mktemp("doctor") / "data"
    flags = {
        "store.data_dir": str(data),
        "model.model": models[1],
        "model.embedder": models[3],
        "engine.pool_bytes": "64M",
        "engine.threads": 1,
    }
    with Memory.open(load_config(flags, env={})) as memory:
        memory.create_collection(CollectionCreate(name="books"))
        done = memory.ingest("books", [DocumentCreate(text=TEXT)], wait=60)
        assert done.documents[0].status == "ready"
    return data


@pytest.fixture
def doctor(run: Run, models: list[str], books: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Over a store with one collection."""
    monkeypatch.setattr(doctor_store, "_PUBLISHING_SECONDS", 0.0)
    shutil.copytree(books, "data")
    return Doctor(run, models)


def block_files() -> list[Path]:
    return sorted(Path("data/blocks").glob("*/*.kv"))


def stray_file(digit: str = "0") -> Path:
    """A block file that no row names, as a kill between name and row leaves it."""
    path = Path("data/blocks") / (digit * 2) / f"{digit * 64}.{'0' * 32}.kv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * 5000)
    return path


def test_a_sound_store_is_said_to_be_one(doctor: Doctor) -> None:
    found = doctor()
    assert {name: found[name]["state"] for name in ("files", "fingerprint", "clock")} == {
        "files": "ok",
        "fingerprint": "ok",
        "clock": "ok",
    }
    assert f"{len(block_files())} block files" in found["files"]["detail"]
    assert "orphans" not in found
    assert "unused" not in found
    assert doctor("--fix")["files"]["state"] == "ok"
    assert doctor.mended == [], "there was nothing to mend"


def test_files_without_rows_are_told_and_removed(doctor: Doctor) -> None:
    stray, kept = stray_file(), block_files()
    found = doctor()
    assert found["orphans"]["state"] == "warning"
    assert "1 block file without a row, left by a kill, take 5.0 kB" in found["orphans"]["detail"]
    assert doctor.exit_code == 0, "a warning"
    assert stray.exists(), "it mended without being asked"
    after = doctor("--fix")
    assert "orphans" not in after
    assert "removed 1 file; before " in doctor.mended[0]
    assert f"mended {doctor.mended[0]}" in doctor.stderr
    assert block_files() == [path for path in kept if path != stray]


def test_rows_without_files_are_told_and_dropped(doctor: Doctor) -> None:
    gone, *_ = block_files()
    gone.unlink()
    found = doctor()
    assert found["files"]["state"] == "warning"
    assert "1 block file of " in found["files"]["detail"]
    assert doctor("--fix")["files"]["state"] == "ok"
    assert doctor.mended[0].startswith("files: dropped 1 row, removed 0 files")
    answer = doctor.run("store", "verify", *WHERE)
    assert answer.exit_code == 0, answer.output


def test_files_that_nothing_refers_to_are_told_and_removed(doctor: Doctor) -> None:
    with sqlite3.connect("data/memkv.db") as connection:
        connection.execute("DELETE FROM chunks")
    found = doctor()
    assert found["unused"]["state"] == "warning"
    assert "that nothing refers to" in found["unused"]["detail"]
    stray_file()
    after = doctor("--fix")
    assert {"unused", "orphans"}.isdisjoint(after)
    assert len(doctor.mended) == 1, "one sweep mends both"


def test_a_file_that_a_server_is_publishing_is_no_orphan(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = stray_file()

    def publish(seconds: float) -> None:  # its row comes while the doctor waits; here: it goes
        stray.unlink()

    monkeypatch.setattr(doctor_store.time, "sleep", publish)
    assert "orphans" not in doctor()


def test_what_a_running_server_holds_is_left_to_it(doctor: Doctor) -> None:
    stray = stray_file()
    with Store.open(Path("data")):
        found = doctor("--fix")
    assert found["orphans"]["state"] == "warning"
    assert doctor.mended == []
    assert "could not be mended: the store is in use by process" in doctor.stderr
    assert stray.exists()


def test_most_of_a_store_is_not_swept_away(doctor: Doctor) -> None:
    strays = [stray_file(digit) for digit in "0123456789abcdef"]
    strays += [path.with_name(f"{path.name[:63]}f{path.name[64:]}") for path in strays[:4]]
    for path in strays[16:]:
        path.write_bytes(b"x")
    found = doctor("--fix")
    assert found["orphans"]["detail"].startswith("20 block files")
    assert "are seldom garbage" in doctor.stderr
    assert all(path.exists() for path in strays)


def test_another_model_is_told(
    doctor: Doctor, minilm: Path, tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor.models = ["--model", str(tiny_model_dir("qwen3")), "--embedder", str(minilm)]
    found = doctor()["fingerprint"]
    assert found["state"] == "warning"
    assert found["detail"].startswith("collection books was made with another weights_digest")
    assert found["detail"].endswith("none of its KV is used")
    assert "memkv store reprefill books" in found["fix"]
    monkeypatch.setenv("MEMKV_KV__DTYPE", "float32")
    assert "kv_dtype" in doctor()["fingerprint"]["detail"]


def test_another_dtype_alone_is_told(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKV_KV__DTYPE", "float32")
    assert "with another kv_dtype: " in doctor()["fingerprint"]["detail"]


def test_what_doctor_calls_stale_the_memory_calls_stale(
    doctor: Doctor, tmp_path: Path, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told from files; here it is held against a loaded model."""
    flags = {"store.data_dir": "data", "model.model": models[1], "model.embedder": models[3]}
    assert doctor()["fingerprint"]["state"] == "ok"
    monkeypatch.setenv("MEMKV_DEVICE", "cpu, cpu")
    for kv_dtype, stale in (("bfloat16", []), ("float32", ["books"])):
        with Memory.open(load_config({**flags, "kv.dtype": kv_dtype})) as memory:
            assert memory.store_stats().stale == stale
        monkeypatch.setenv("MEMKV_KV__DTYPE", kv_dtype)
        assert (doctor()["fingerprint"]["state"] == "warning") == bool(stale)


def test_rows_from_the_future_are_told(doctor: Doctor) -> None:
    ahead = datetime.now(UTC) + timedelta(days=3650)
    with sqlite3.connect("data/memkv.db") as connection:
        moment = int(ahead.timestamp() * 1_000_000)
        connection.execute("UPDATE kv_files SET verified_at = ?", (moment,))
    found = doctor()["clock"]
    assert found["state"] == "warning"
    assert f"{len(block_files())} rows from the future, the latest of {ahead:%Y-%m-%d}" in found["detail"]
    assert "set the clock" in found["fix"]


def test_a_blocks_directory_that_cannot_be_read_is_told(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("data/blocks").rename("data/elsewhere")
    found = doctor()["files"]
    assert found["state"] == "failed"
    assert doctor.exit_code == 1


def test_an_empty_place_has_nothing_to_find(run: Run, models: list[str]) -> None:
    found = Doctor(run, models)()
    assert {"files", "fingerprint", "clock"}.isdisjoint(found)
