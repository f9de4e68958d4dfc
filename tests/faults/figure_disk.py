"""G12: disks that are full at every write; G2: power cuts. Both need leave to mount."""

from __future__ import annotations

import fcntl
import json
import os
import random
import struct
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fault_journal import Journal
from fault_life import NAME, calls, check_answer, end, put
from fault_model import document_text, fake_models, fault_config
from fault_place import SQLITE, Outcome, Place, Stage, Unavailable
from fault_process import SIGKILLED
from small_disk import resize, used

from memkv.errors import InsufficientStorageError, MemKVError
from memkv.memory import Memory
from memkv.wire import CollectionCreate, DocumentCreate, StoreGC

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NO_FLUSH = 2


def full_disk(place: Place, *, sizes: int = 200, step: int = 4096) -> Outcome:
    """Free space of 0, 1, 2 .. `sizes` steps while documents come."""
    outcome = Outcome(runs=sizes)
    with place.store() as stage, _small_disk(stage.directory):
        found = _fill(stage, "", sizes, step)
    outcome.violations, outcome.notes = found["violations"], found["notes"]
    with place.store() as stage, _small_disk(stage.directory):
        weak = _fill(stage, "full_disk_is_an_accident", 32, 16384)
    outcome.control_detected["full_disk_is_an_accident"] = bool(weak["violations"])
    return outcome


def _fill(stage: Stage, weakness: str, sizes: int, step: int) -> dict:  # type: ignore[type-arg]
    result = stage.directory / "result"
    child = stage.nursery.start(
        "figure_disk:ingest_on_full_disk", weakness,
        disk=str(stage.directory / "disk"), url=stage.url, result=str(result), sizes=sizes, step=step,
    )  # fmt: skip
    status = child.wait(1800)
    if status != 0:
        return {"violations": [f"ended with {status}: {stage.nursery.last_words(600)}"], "notes": {}}
    return json.loads(result.read_text())  # type: ignore[no-any-return]


@contextmanager
def _small_disk(directory: Path) -> Iterator[Path]:
    disk = directory / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        raise Unavailable("mounting a tmpfs is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def ingest_on_full_disk(disk: str, url: str | None, result: str, sizes: int, step: int) -> None:
    """In the child."""
    violations: list[str] = []
    seen = {"accepted": 0, "refused": 0, "failed": 0, "ready": 0}
    mounted = Path(disk)
    with fake_models(), Memory.open(fault_config(f"{disk}/data", url)) as memory:
        memory.create_collection(CollectionCreate(name=NAME))
        put(memory, Journal("/dev/null"), "kept", [9000])
        for size in range(sizes):
            notes = [(size * 12 + index) % 9000 for index in range(12)]
            document = DocumentCreate(text=document_text(notes), external_id="new")
            resize(mounted, used(mounted) + size * step)
            try:
                accepted = memory.ingest(NAME, [document], wait=1)
                seen["accepted"] += 1
                status = accepted.documents[0].status
                error = memory.get_document(NAME, "new").error
                if status == "failed" and (error is None or error.status != 507):
                    violations.append(f"{size}: failed with {error}")
                seen[status] = seen.get(status, 0) + 1
            except InsufficientStorageError:
                seen["refused"] += 1
            except MemKVError as error:
                violations.append(f"{size}: {error.status} {error.code}: {error.detail}")
            violations += [f"{size}, full: {each}" for each in check_answer(memory, "kept", 9000)]
            problems = memory.verify_store(full=True).problems
            violations += [f"{size}: {p.kind}" for p in problems if p.kind not in ("orphan", "unused")]
            resize(mounted, 64 << 20)
            memory._resume_starved()
            accepted = memory.ingest(NAME, [document], wait=30)
            if accepted.documents[0].status != "ready":
                violations.append(f"{size}: not ready although there is room: {accepted.documents[0].status}")
            for note in notes[:3]:
                violations += [f"{size}: {each}" for each in check_answer(memory, "new", note)]
            memory.forget(NAME, "new")
            left = os.listdir(Path(disk) / "data" / "tmp")
            violations += [f"{size}: left in tmp: {left}"] if left else []
            if len(violations) > 20:
                break
        end(memory, memory.admin.gc(StoreGC(force=True)))
        violations += [f"at the end: {p.kind} {p.detail}" for p in memory.verify_store(full=True).problems]
    Path(result).write_text(json.dumps({"violations": violations, "notes": seen}))


# Power cuts


def power_cuts(place: Place, *, cuts: int = 500) -> Outcome:
    """An ext4 on a loop device stops without flushing its log. A kill is no power cut: what the system has
    in memory survives it. A PostgreSQL lies elsewhere and loses nothing: every row outlives its file."""
    outcome = Outcome()
    with place.store() as stage, _loop_device(stage.directory) as device:
        outcome.runs, outcome.violations = _cut(stage, device, "", place.repetitions(cuts))
    sqlites_own = ("synchronous_normal", "synchronous_off") if place.database == SQLITE else ()
    for weakness in ("no_fsync", *sqlites_own):
        with place.store() as stage, _loop_device(stage.directory) as device:
            _, found = _cut(stage, device, weakness, range(min(cuts, 30)))
            outcome.control_detected[weakness] = bool(found)
    return outcome


@contextmanager
def _loop_device(directory: Path) -> Iterator[Path]:
    image = directory / "image"
    with image.open("wb") as file:
        file.truncate(96 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, check=False)
    (directory / "disk").mkdir()
    if made.returncode != 0 or not _mount(image, directory / "disk"):
        raise Unavailable("mounting a loop device is not allowed here")
    try:
        yield image
    finally:
        subprocess.run(["umount", str(directory / "disk")], check=False)


def _mount(image: Path, disk: Path) -> bool:
    command = ["mount", "-o", "loop", str(image), str(disk)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _cut(stage: Stage, image: Path, weakness: str, cuts: Iterable[int]) -> tuple[int, list[str]]:
    """How many there were, and the violations.

    The same store throughout; the first broken promise with a protection off is enough.
    """
    made = 0
    violations: list[str] = []
    disk = stage.directory / "disk"
    chance = random.Random(3)
    arguments = {**stage.arguments, "data_dir": str(disk / "data")}
    result = stage.directory / "result"
    stage.nursery.run("fault_life:prepare", weakness, **arguments, piece="gc", round_=0)
    os.sync()
    for cut in cuts:
        piece = chance.choice(("ingest", "ingest", "ingest", "delete", "gc"))
        at = chance.randrange(1, calls(stage.url, piece))
        status = stage.nursery.run("fault_life:live", weakness, **arguments, piece=piece, round_=cut, at=at)
        if status not in (0, SIGKILLED):
            violations.append(f"cut {cut}: {piece} ended with {status}: {stage.nursery.last_words(300)}")
        _power_off(disk)
        subprocess.run(["umount", str(disk)], check=True)
        assert _mount(image, disk)
        result.unlink(missing_ok=True)
        status = stage.nursery.run(
            "fault_life:check", "",
            **arguments, result=str(result), then="gc", round_=cut + 1, unharmed=True,
        )  # fmt: skip
        found = json.loads(result.read_text()) if result.exists() else ["the check failed"]
        if status != 0 and not found:
            found = [f"the check ended with {status}: {stage.nursery.last_words(300)}"]
        violations += [f"cut {cut} ({piece}, call {at}): {each}" for each in found]
        made += 1
        if violations and (weakness or len(violations) > 10):
            break
    return made, violations


def _power_off(disk: Path) -> None:
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_FLUSH))
    finally:
        os.close(fd)
