"""A snapshot restored through a server: it ends what runs, restores, and serves again on the same socket."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memkv import MemKV
from memkv.errors import DocumentNotFound, MemKVError, NotFoundError

SERVE = [sys.executable, "-c", "from memkv.cli import main; main(prog_name='memkv')", "serve", "--port", "0"]


@pytest.fixture(scope="module")
def process(
    tmp_path_factory: pytest.TempPathFactory, minilm: Path, tiny_model_dir: Callable[[str], Path]
) -> Iterator[subprocess.Popen[str]]:
    """`memkv serve` with a tiny model; it must end with exit code 0 when it is told to stop."""
    place = tmp_path_factory.mktemp("restore")
    models = ["--model", str(tiny_model_dir("llama")), "--embedder", str(minilm), "--data-dir", "data", "-q"]
    (place / "memkv.toml").write_text("[engine]\npool_bytes = '64M'\nthreads = 1\n")
    started = subprocess.Popen([*SERVE, *models], cwd=place, stdout=subprocess.PIPE, text=True)
    started.place = place  # type: ignore[attr-defined]
    try:
        yield started
        started.send_signal(signal.SIGTERM)
        assert started.wait(30) == 0
    finally:
        started.kill()
        started.wait()


@pytest.fixture(scope="module")
def client(process: subprocess.Popen[str]) -> Iterator[MemKV]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("memkv listens on "), line
    with MemKV(line.split()[-1]) as client:
        yield client


def test_the_store_is_as_it_was_and_the_same_server_serves_it(
    client: MemKV, process: subprocess.Popen[str]
) -> None:
    client.collections.get_or_create("c")
    client.documents.create("c", text="What was there before.", external_id="before")
    made = client.store.create_snapshot().snapshot
    client.documents.create("c", text="What came after it.", external_id="after")
    assert client.store.check_snapshot(made.id).snapshot == made
    assert client.documents.retrieve("c", "after").status == "ready", "it was only looked at"

    work = client.store.restore_snapshot(made.id)
    assert work.job is not None
    assert (work.job.kind, work.job.status) == ("restore", "succeeded")
    with pytest.raises(DocumentNotFound):
        client.documents.retrieve("c", "after")
    assert client.documents.retrieve("c", "before").status == "ready"
    assert client.search("before", collection="c").data[0].text == "What was there before."
    assert client.jobs.retrieve(work.job.id) == work.job, "the database that is there now knows of it"
    assert client.ready().status == "ready"
    found = client.store.verify(repair=True).job
    assert found is not None
    assert found.verification is not None
    assert {problem.kind for problem in found.verification.problems} <= {"orphan", "unused"}
    client.documents.create("c", text="And on it goes.", external_id="on")
    assert process.poll() is None


def test_a_damaged_snapshot_is_refused_and_nothing_stops(
    client: MemKV, process: subprocess.Popen[str]
) -> None:
    made = client.store.create_snapshot().snapshot
    place: Path = process.place  # type: ignore[attr-defined]
    database = place / "data" / "snapshots" / made.id / "database"
    data = bytearray(database.read_bytes())
    data[len(data) // 2] ^= 1
    database.write_bytes(data)
    for call in (client.store.check_snapshot, client.store.restore_snapshot):
        with pytest.raises(MemKVError, match="the snapshot's database is damaged"):
            call(made.id)
    with pytest.raises(NotFoundError):
        client.store.restore_snapshot(f"snp_{'0' * 32}")
    assert client.ready().status == "ready"
    client.store.delete_snapshot(made.id)


def test_who_does_not_wait_finds_the_job(client: MemKV) -> None:
    made = client.store.create_snapshot().snapshot
    started = client.store.restore_snapshot(made.id, wait=False).job
    assert started is not None
    assert started.status == "running"
    deadline = time.monotonic() + 60
    job = started
    while job.status == "running" and time.monotonic() < deadline:
        try:
            job = client.jobs.retrieve(started.id)
        except MemKVError:  # it drains
            time.sleep(0.1)
    assert job.status == "succeeded"
