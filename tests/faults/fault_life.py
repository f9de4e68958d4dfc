"""Pieces of a memory's life, run in children that are killed, and the check of what the kill left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from fault_closed import (
    CLOSED,
    check_backup,
    check_snapshot,
    keep_as_killed,
    leave_as_killed,
    upgrade,
)
from fault_journal import Journal, State, possible_states
from fault_model import document_text, fake_models, fault_config, notes_of, question_for
from fault_process import kill_at

from memkv.engine.residency import ChunkRef
from memkv.errors import DocumentNotFound, MemKVError
from memkv.memory import Memory
from memkv.wire import (
    ChangeWork,
    CollectionCreate,
    DocumentCreate,
    PageRequest,
    QueryRequest,
    SnapshotCreate,
    SnapshotWork,
    StoreCollection,
    StoreCompact,
    StoreEvict,
    StoreGC,
    StorePurge,
    StoreVerify,
    StoreWork,
)

NAME = "c"
_PATIENCE = 30.0  # seconds for what goes on by itself


def live(data_dir: str, url: str | None, journal: str, piece: str, round_: int, at: int = 0) -> None:
    """Opens the memory, lives one piece of `PIECES` and closes it; one of `CLOSED` is lived without.

    SIGKILL comes at the call `at` of the piece. The calls of an opening are those of the piece `start`.
    """
    if piece not in LIVED_ON:
        kill_at(at)
    if piece in CLOSED:
        CLOSED[piece](Path(data_dir), url, Journal(journal), brought(round_))
        return
    with fake_models(), Memory.open(fault_config(data_dir, url)) as memory:
        if piece in LIVED_ON:
            kill_at(at)
        PIECES[piece](memory, Journal(journal), round_)


def prepare(data_dir: str, url: str | None, journal: str, piece: str, round_: int) -> None:
    """Brings the store into the state in which `piece` has something to do."""
    with fake_models(), Memory.open(fault_config(data_dir, url)) as memory:
        _prepare_open(memory, Journal(journal), piece, round_)
    _prepare_closed(Path(data_dir), piece)


def _prepare_open(memory: Memory, said: Journal, piece: str, round_: int) -> None:
    memory.create_collection(CollectionCreate(name=NAME), exist_ok=True)
    put(memory, said, "changing", [9000, 9001])
    if piece != "ingest":
        for name, notes in brought(round_).items():
            put(memory, said, name, notes)
    if piece in ("gc", "start"):
        make_garbage(memory)
    if piece == "reprefill":
        end(memory, memory.admin.evict(StoreEvict(to_bytes=0)))
    if piece == "import":
        memory.export(_archive(memory), with_kv=True)
        delete(memory, said, "one")
        delete(memory, said, "eight")
    if piece in ("snapshot", "restore"):
        for kept in memory.admin.snapshots().data:
            memory.admin.delete_snapshot(kept.id)
    if piece == "restore":
        end(memory, memory.admin.create_snapshot(SnapshotCreate()))
        put(memory, said, "one", [(round_ + 1) % 4000])
        delete(memory, said, "eight")
        for name, notes in brought(round_).items():
            said.begin(name, notes)
        keep_as_killed(memory)
    if piece in DAMAGED:
        damage_files(memory)
    if piece == "purge":
        memory._maintenance.verify(StoreVerify(full=True, repair=True), lambda done, total: None)


def _prepare_closed(data_dir: Path, piece: str) -> None:
    """What a killed writer and a careless hand leave."""
    if piece == "start":
        (data_dir / "tmp" / "draft").write_bytes(b"x" * 100)
        sorted((data_dir / "blocks").glob("*/*.kv"))[0].unlink()
    if piece == "restore":
        leave_as_killed(data_dir)


def _archive(memory: Memory) -> Path:
    """Where `prepare` leaves an archive for `import`; the last one is gone."""
    path = memory._store.data_dir.with_name("archive")
    path.unlink(missing_ok=True)
    return path


def brought(round_: int) -> dict[str, list[int]]:
    """The documents of a round, and their notes."""
    return {"one": [round_ % 4000], "eight": eight_notes(round_)}


def eight_notes(round_: int) -> list[int]:
    return [4000 + (round_ * 8 + index) % 4000 for index in range(8)]


def put(memory: Memory, said: Journal, name: str, notes: list[int]) -> None:
    said.begin(name, notes)
    accepted = memory.ingest(NAME, [DocumentCreate(text=document_text(notes), external_id=name)])
    said.done(name, notes)
    if accepted.job is not None:
        memory.wait_job(accepted.job.id, _PATIENCE)


def delete(memory: Memory, said: Journal, name: str) -> None:
    said.begin(name, None)
    memory.forget(NAME, name)
    said.done(name, None)


def end(memory: Memory, work: ChangeWork | SnapshotWork | StoreWork) -> None:
    """Waits for the job that was started."""
    assert work.job is not None
    job = memory.wait_job(work.job.id, _PATIENCE)
    assert job.status == "succeeded", job


def make_garbage(memory: Memory) -> None:
    """A file whose key nothing refers to, and one that no row names."""
    opened = memory._collections.by_name("default", NAME)
    tokens = [tuple(memory._parts.tokenizer.encode(f"garbage {word}")) for word in ("one", "two")]
    refs = [ChunkRef(opened.key(ids), opened.prefix.token_ids, ids) for ids in tokens]
    made = memory._parts.engine.prefill(opened.prefix, refs, opened.kv, block_size=opened.row.block_size)
    opened.kv.publish(list(zip(refs, made, strict=True)))
    row = memory._store.catalog.file_for("default", refs[0].input_key)
    assert row is not None
    memory._store.catalog.drop_files_of_all_tenants([row])


def damage_files(memory: Memory) -> None:
    """One byte of every second file; what is resident is forgotten, as after a restart."""
    for row in memory._store.catalog.files_of_all_tenants()[::2]:
        path = memory._store.chunks._directory.path(row)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        replace_bytes(path, data)
        memory._parts.engine.drop([row.input_key])


def replace_bytes(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o400)


# Pieces of life


def _ingest(memory: Memory, said: Journal, round_: int) -> None:
    for name, notes in brought(round_).items():
        put(memory, said, name, notes)
    put(memory, said, "changing", [9000, 9002 + round_ % 900])


def _delete(memory: Memory, said: Journal, _: int) -> None:
    delete(memory, said, "one")
    delete(memory, said, "eight")


def _gc(memory: Memory, _: Journal, __: int) -> None:
    end(memory, memory.admin.gc(StoreGC(force=True)))


def _compact(memory: Memory, _: Journal, __: int) -> None:
    end(memory, memory.admin.compact(StoreCompact()))


def _evict(memory: Memory, _: Journal, __: int) -> None:
    end(memory, memory.admin.evict(StoreEvict(to_bytes=0)))


def _reprefill(memory: Memory, _: Journal, __: int) -> None:
    work = memory.reprefill(StoreCollection(collection=NAME))
    if work.job is not None:
        end(memory, work)


def _heal(memory: Memory, _: Journal, round_: int) -> None:
    for note in [round_ % 4000, *eight_notes(round_)]:
        memory.query(QueryRequest(query=question_for(note), collection=NAME, policy="map", top_k=1))


def _repair(memory: Memory, _: Journal, __: int) -> None:
    end(memory, memory.admin.verify(StoreVerify(full=True, repair=True)))


def _purge(memory: Memory, _: Journal, __: int) -> None:
    end(memory, memory.admin.purge(StorePurge()))


def _start(memory: Memory, _: Journal, __: int) -> None:
    memory.ready()


def _import(memory: Memory, said: Journal, round_: int) -> None:
    for name, notes in brought(round_).items():
        said.begin(name, notes)
    memory.import_archive(memory._store.data_dir.with_name("archive"), with_kv=True)
    for name, notes in brought(round_).items():
        said.done(name, notes)


def _snapshot(memory: Memory, _: Journal, __: int) -> None:
    end(memory, memory.admin.create_snapshot(SnapshotCreate()))


PIECES: dict[str, Callable[[Memory, Journal, int], None]] = {
    "ingest": _ingest,
    "delete": _delete,
    "gc": _gc,
    "compact": _compact,
    "import": _import,
    "snapshot": _snapshot,
    "evict": _evict,
    "reprefill": _reprefill,
    "heal": _heal,
    "repair": _repair,
    "purge": _purge,
    "start": _start,
}

_CALLS = {  # that change something, about as many as there are on SQLite
    "ingest": 370, "delete": 110, "gc": 30, "evict": 40, "reprefill": 180, "heal": 120, "start": 60,
}  # fmt: skip
LIVED_ON = tuple(piece for piece in PIECES if piece != "start")  # those that an open memory can go on with
DAMAGED = ("heal", "repair", "purge")  # those that begin with damaged files


def calls(url: str | None, piece: str) -> int:
    """About as many as there are in it to be killed at; each message to a PostgreSQL server is one."""
    return _CALLS[piece] * (1 if url is None else 2)


# The check


def check(
    data_dir: str, url: str | None, journal: str, result: str, then: str | None = None, round_: int = 0,
    at: int = 0, damaged: bool = False, downgraded: bool = False, unharmed: bool = False,
) -> None:  # fmt: skip
    """Opens the store as a new process would; prepares for the piece `then` afterwards.

    `at`: goes on to live that piece, one of `LIVED_ON`, and is killed at that call of it.
    `damaged`: files were damaged on purpose, so that some are still found so; `downgraded`: the schema may be
    an older one, and is upgraded before; `unharmed`: nobody took files away, so that each row has its own.

    Writes the violations to `result`: each promise found broken is one sentence.
    """
    found = check_backup(Path(data_dir))
    if downgraded:
        upgrade(Path(data_dir), url)
    with fake_models():
        try:
            memory = Memory.open(fault_config(data_dir, url))
        except MemKVError as error:
            found.append(f"the store does not open: {error.code}: {error.detail}")
        else:
            with memory:
                if unharmed and memory._store.recovery.rows_dropped:
                    found.append(f"{memory._store.recovery.rows_dropped} rows without their file")
                found += _check_open(memory, possible_states(journal), damaged)
                if then is not None:
                    _prepare_open(memory, Journal(journal), then, round_)
                if then is not None and at:
                    Path(result).write_text(json.dumps(found + _left_behind(data_dir)))
                    kill_at(at)
                    PIECES[then](memory, Journal(journal), round_)
                    return
    Path(result).write_text(json.dumps(found + _left_behind(data_dir)))
    if then is not None:
        _prepare_closed(Path(data_dir), then)


def _left_behind(data_dir: str) -> list[str]:
    """What nothing would ever use or remove."""
    leftover = os.listdir(Path(data_dir) / "tmp")
    found = [f"left in tmp: {leftover}"] if leftover else []
    found += [
        f"left in quarantine: {reason.name}, which is of no file"
        for reason in Path(data_dir, "quarantine").glob("*.json")
        if not reason.with_suffix("").exists()
    ]
    for snapshot in Path(data_dir, "snapshots").glob("*"):
        found += check_snapshot(snapshot)
    return found


def _check_open(memory: Memory, states: dict[str, set[State]], damaged: bool) -> list[str]:
    expected = ("orphan", "unused", "digest") if damaged else ("orphan", "unused")
    damage = memory._maintenance.verify(StoreVerify(full=True, repair=damaged), lambda done, total: None)
    found = [f"after opening: {p.kind} {p.detail}" for p in damage.problems if p.kind not in expected]
    found += wait_for_jobs(memory)
    for name, possible in states.items():
        found += check_document(memory, name, possible)
    end(memory, memory.admin.gc(StoreGC(force=True)))
    left = memory.verify_store(full=True)
    found += [f"after gc: {p.kind} {p.detail}" for p in left.problems]
    memory._parts.engine.check_integrity()
    pool = memory.store_stats().pool
    if pool.get("pinned") or pool.get("private"):
        found.append(f"blocks leak: {pool}")
    return found


def wait_for_jobs(memory: Memory) -> list[str]:
    deadline = time.monotonic() + _PATIENCE
    for status in ("queued", "running"):
        for job in memory.list_jobs(PageRequest(limit=100), status=status).data:
            if not memory.wait_job(job.id, max(0.0, deadline - time.monotonic())).finished_at:
                return [f"job {job.kind} does not end"]
    return []


def check_document(memory: Memory, name: str, possible: set[State]) -> list[str]:
    """Whether it is in a state that it may be in, and answers name what they should."""
    try:
        document = memory.get_document(NAME, name)
    except DocumentNotFound:
        return [] if None in possible else [f"{name} was acknowledged and is lost"]
    if document.status != "ready":
        return [f"{name} is {document.status}: {document.error}"]
    texts = {document_text(notes): notes for notes in possible if notes is not None}
    _, text = memory._store.catalog.document_text("default", document.id)
    if text not in texts:
        return [f"{name} holds what was deleted or never put: {notes_of(text)}; possible: {possible}"]
    found = []
    for note in texts[text]:
        found += check_answer(memory, name, note)
    return found


def check_answer(memory: Memory, name: str, note: int, policy: str = "map") -> list[str]:
    """Asks for a note of a document."""
    response = memory.query(QueryRequest(query=question_for(note), collection=NAME, policy=policy, top_k=2))
    named = [number for chunk in response.chunks for number in notes_of(chunk.text)]
    if notes_of(response.answer) != named or len(response.answer) != 5 * len(named):
        return [f"a wrong answer: {response.answer!r} from notes {named}"]
    if note not in named:
        return [f"note {note} of {name} is not found; found: {named}"]
    return []
