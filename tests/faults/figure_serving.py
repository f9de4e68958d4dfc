"""Of a served store: G6 leaks, G7 a small pool, G8 readiness, G14 deletion under load, G15 healing."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_life import NAME, replace_bytes
from fault_load import Load, Served, serve, wrong_answer
from fault_model import document_text, notes_of, question_for
from fault_place import Outcome, Place, Stage

from memkv.errors import DocumentNotFound, MemKVError
from memkv.sdk import MemKV

_SPARE_FDS = 40  # of pools that grow to a size and stay there: database connections, readers


def forgotten(place: Place, *, seconds: float = 600.0, clients: int = 32) -> Outcome:
    """G14: questions, deletions and gc at once; nothing of a document in answers that began after its 204."""
    outcome = Outcome()
    with place.store() as stage:
        outcome.violations, outcome.runs, outcome.notes = _forget_under_load(serve(stage), seconds, clients)
    with place.store() as stage:
        weak, _, _ = _forget_under_load(serve(stage, "deletes_late"), min(seconds, 15.0), clients)
    outcome.control_detected["deletes_late"] = any("after its deletion" in each for each in weak)
    return outcome


def _forget_under_load(
    served: Served, seconds: float, clients: int
) -> tuple[list[str], int, dict[str, float | int | str]]:
    violations: list[str] = []
    gone: dict[int, float] = {}  # note -> when its 204 came
    notes = itertools.count()
    stop = time.monotonic() + seconds
    counts = {"questions": 0, "deletions": 0, "gc": 0}
    guard = threading.Lock()
    living: dict[str, list[int]] = {}

    def put(client: MemKV, name: str) -> None:
        with guard:
            mine = [next(notes) % 10_000 for _ in range(3)]
            for note in mine:
                gone.pop(note, None)
        client.documents.upsert(NAME, name, text=document_text(mine), wait=60)
        with guard:
            living[name] = mine

    def delete(client: MemKV, chance: random.Random) -> None:
        with guard:
            if not living:
                return
            name = chance.choice(list(living))
            mine = living.pop(name)
        client.documents.delete(NAME, name)
        with guard:
            counts["deletions"] += 1
            gone.update(dict.fromkeys(mine, time.monotonic()))
        put(client, name)

    def ask(client: MemKV, chance: random.Random) -> None:
        with guard:
            old = list(gone)[-30:]
            wanted = chance.choice(old) if old and chance.random() < 0.5 else chance.randrange(10_000)
            if living and chance.random() < 0.5:
                wanted = chance.choice(living[chance.choice(list(living))])
        begun = time.monotonic()
        response = client.query(
            question_for(wanted), collection=NAME, policy=chance.choice(("map", "head:1", "exact"))
        )
        wrong = wrong_answer(response)
        with guard:
            counts["questions"] += 1
            if wrong:
                violations.append(wrong)
            said = {*notes_of(response.answer), *(n for c in response.chunks for n in notes_of(c.text))}
            late = [note for note in said if gone.get(note, begun) < begun]
            if late:
                violations.append(f"notes {late} seen after its deletion")

    def work(number: int) -> None:
        chance = random.Random(number)
        with served.client() as client:
            while time.monotonic() < stop and len(violations) < 50:
                try:
                    if number == 0:
                        client.store.gc(force=True)
                        counts["gc"] += 1
                        time.sleep(0.05)
                    elif number % 4 == 1:
                        delete(client, chance)
                    else:
                        ask(client, chance)
                except DocumentNotFound:
                    pass
                except MemKVError as error:
                    if error.status not in (503, 409):
                        with guard:
                            violations.append(f"{error.status} {error.code}: {error.detail}")

    with served.client() as client:
        client.collections.get_or_create(NAME)
        for number in range(24):
            put(client, f"d{number}")
        _in_threads(clients, work, violations, seconds + 90)
        violations += _idle(client)
    served.child.kill()
    return violations, counts["questions"], dict(counts)


def _in_threads(count: int, work: Callable[[int], None], violations: list[str], patience: float) -> None:
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            violations.append("a request hangs")
            return


def _idle(client: MemKV) -> list[str]:
    """Blocks that somebody holds although nobody asks anything."""
    for _ in range(100):
        pool = client.store.stats().pool
        if not pool["pinned"] and not pool["private"]:
            return []
        time.sleep(0.05)
    return [f"blocks leak: {pool}"]


def small_pool(place: Place, *, queries: int = 200, impossible: int = 20, rounds: int = 5) -> Outcome:
    """G7: a pool of 64 blocks, questions that need most of it, and some that never fit."""
    outcome = Outcome()
    slowest = 0.0
    with place.store() as stage:
        served = serve(stage, **{"engine.pool_bytes": 64 * 16 * 128, "engine.queue_seconds": 10.0})
        with served.client() as client:
            client.collections.get_or_create(NAME)
            for number in range(20):
                client.documents.upsert(NAME, f"d{number}", text=document_text([number]))
            guard = threading.Lock()
            for _ in range(rounds):
                finished: list[str] = []

                def ask(number: int, finished: list[str] = finished) -> None:
                    never = number >= queries
                    try:
                        response = client.query(
                            question_for(number % 20), collection=NAME, policy="map",
                            top_k=20 if never else 3 + number % 4, max_tokens=900 if never else 8,
                        )  # fmt: skip
                        wrong = wrong_answer(response) if not never else "an impossible question was answered"
                        if wrong and not (response.finish_reason == "length" and not never):
                            outcome.violations.append(wrong)
                        with guard:
                            finished.append("answered")
                    except MemKVError as error:
                        with guard:
                            finished.append(error.code)
                        if error.status not in ((413,) if never else (503,)):
                            outcome.violations.append(f"{error.status} {error.code}: {error.detail}")

                _in_threads(queries + impossible, ask, outcome.violations, 180)
                outcome.runs += queries + impossible
                for code in set(finished):
                    outcome.notes[code] = int(outcome.notes.get(code, 0)) + finished.count(code)
            alone: list[float] = []
            for _ in range(20):  # without 200 others in this process's threads
                begun = time.monotonic()
                try:
                    client.query(question_for(1), collection=NAME, policy="map", top_k=20, max_tokens=900)
                    outcome.violations.append("an impossible question was answered")
                except MemKVError as error:
                    if error.status != 413:
                        outcome.violations.append(f"{error.status} {error.code}")
                alone.append(time.monotonic() - begun)
            slowest = max(alone)
            if statistics.median(alone) > 0.1:
                outcome.violations.append(f"an impossible question is refused after {alone}")
            outcome.violations += _idle(client)
        served.child.kill()
    outcome.notes["slowest refusal ms"] = round(slowest * 1000)
    outcome.control_detected["no_admission"] = _hang_is_noticed(place)
    return outcome


def _hang_is_noticed(place: Place) -> bool:
    """Without the check against the whole pool an impossible question waits for its deadline."""
    with place.store() as stage:
        changes: dict[str, Any] = {"engine.pool_bytes": 64 * 16 * 128, "engine.queue_seconds": 3.0}
        served = serve(stage, "no_admission", **changes)
        with served.client() as client:
            client.collections.get_or_create(NAME)
            for number in range(20):
                client.documents.upsert(NAME, f"d{number}", text=document_text([number]))
            begun = time.monotonic()
            try:
                client.query(question_for(1), collection=NAME, policy="map", top_k=20, max_tokens=900)
            except MemKVError as error:
                return error.status != 413 or time.monotonic() - begun > 0.5
    return True


def readiness(place: Place, *, chunks: int = 10_000) -> Outcome:
    """G8: from a kill -9 to the first answer, against the start of an empty store."""
    outcome = Outcome()
    with place.store() as stage:
        empty = min(_time_a_start(stage) for _ in range(3))
    with place.store() as stage:
        served = serve(stage)
        with served.client(timeout=600) as client:
            client.collections.get_or_create(NAME)
            each = 100
            for number in range(chunks // each):
                notes = [(number * each + index) % 10_000 for index in range(each)]
                client.documents.upsert(NAME, f"d{number}", text=document_text(notes), wait=300)
        times = []
        for _ in range(5):
            served.child.kill()
            served = serve(stage)
            with served.client() as client:
                wrong = wrong_answer(client.query(question_for(17), collection=NAME, policy="map"))
                stats = client.store.stats()
            times.append(served.seconds)
            outcome.runs += 1
            if wrong:
                outcome.violations.append(wrong)
            if stats.counters.get("published"):
                outcome.violations.append("chunks were prefilled again")
        served.child.kill()
    added = statistics.median(times) - empty
    outcome.notes = {
        "chunks": stats.chunks,
        "empty s": round(empty, 2),
        "full s": round(statistics.median(times), 2),
        "added s": round(added, 2),
    }
    if added > 2.0:
        outcome.violations.append(f"readiness adds {added:.2f} s")
    outcome.control_detected["slow_start"] = _slow_start_is_noticed(place, empty)
    return outcome


def _time_a_start(stage: Stage) -> float:
    served = serve(stage)
    served.child.kill()
    return served.seconds


def _slow_start_is_noticed(place: Place, empty: float) -> bool:
    """A start that reads every file: here one that takes 3 s longer."""
    with place.store() as stage:
        served = serve(stage, "slow_start")
        served.child.kill()
        return served.seconds - empty > 2.0


def healed(place: Place, *, seconds: float = 60.0, documents: int = 100, clients: int = 8) -> Outcome:
    """G15: 5 % of the blocks destroyed under load."""
    outcome = Outcome()
    with place.store() as stage:
        outcome.violations, outcome.runs, outcome.notes = _heal_under_load(
            stage, "", seconds, documents, clients
        )
    with place.store() as stage:
        weak, _, _ = _heal_under_load(stage, "no_verification", min(seconds, 20.0), documents, clients)
    outcome.control_detected["no_verification"] = any("wrong answer" in each for each in weak)
    return outcome


def _heal_under_load(
    stage: Stage, weakness: str, seconds: float, documents: int, clients: int
) -> tuple[list[str], int, dict[str, float | int | str]]:
    # A pool much smaller than the corpus, so that questions go to the files.
    served = serve(stage, weakness, **{"engine.pool_bytes": 400 * 16 * 128})
    violations: list[str] = []
    times: list[tuple[float, float]] = []
    with served.client(timeout=600) as client:
        client.collections.get_or_create(NAME)
        for number in range(documents):
            notes = [number * 5 + index for index in range(5)]
            client.documents.upsert(NAME, f"d{number}", text=document_text(notes))
        stop = time.monotonic() + seconds

        def ask(number: int) -> None:
            while time.monotonic() < stop and len(violations) < 50:
                begun = time.monotonic()
                note = next(turns) * 7 % (documents * 5)
                try:
                    response = client.query(question_for(note), collection=NAME, policy="map", top_k=2)
                except MemKVError as error:
                    violations.append(f"{error.status} {error.code}: {error.detail}")
                    continue
                times.append((begun, time.monotonic() - begun))
                wrong = wrong_answer(response)
                if wrong:
                    violations.append(wrong)

        destroyed: list[float] = []
        turns = itertools.count()

        def destroy(number: int) -> None:
            if number < clients:
                ask(number)
                return
            time.sleep(seconds / 3)
            chance = random.Random(1)
            files = sorted(
                Path(stage.data_dir, "blocks").glob("*/*.kv"), key=lambda path: path.stat().st_size
            )
            # Not the largest, the prefix: it stays resident, so that no question reads it again.
            for path in chance.sample(files[:-1], len(files) // 20):
                data = bytearray(path.read_bytes())
                at = chance.randrange(4096, len(data) - 64)
                data[at : at + 64] = os.urandom(64)
                replace_bytes(path, data)
            destroyed.append(time.monotonic())

        _in_threads(clients + 1, destroy, violations, seconds + 120)
        count = (documents * 5 + 1) // 20
        before = [took for begun, took in times if begun < destroyed[0]]
        after = [took for begun, took in times if begun >= destroyed[0]]
        p99 = [statistics.quantiles(each, n=100)[98] for each in (before, after)]
        job = client.store.verify(full=True).job
        left = job.verification.found if job is not None and job.verification is not None else -1
        counters = client.store.stats().counters
        notes: dict[str, float | int | str] = {
            "destroyed": count,
            "damage found": sum(n for name, n in counters.items() if name.startswith("damaged_")),
            "still damaged at the end": left,
            "p99 before ms": round(p99[0] * 1000),
            "p99 after ms": round(p99[1] * 1000),
        }
        if not weakness:
            if left:
                violations.append(f"{left} files are not healed after {seconds * 2 / 3:.0f} s")
            if p99[1] > 3 * p99[0]:
                violations.append(f"p99 grew from {p99[0]:.3f} to {p99[1]:.3f} s")
        violations += _idle(client)
    served.child.kill()
    return violations, len(times), notes


def leaks(place: Place, *, seconds: float = 1800.0, clients: int = 64) -> Outcome:
    """G6: mixed load, 30 % of the answers broken off, files damaged now and then; nothing grows."""
    outcome = Outcome()
    with place.store() as stage:
        outcome.violations, outcome.runs, outcome.notes = _load_for(stage, "", seconds, clients)
    with place.store() as stage:
        weak, _, _ = _load_for(stage, "leaking_pins", min(seconds, 20.0), min(clients, 8))
    outcome.control_detected["leaking_pins"] = any("leak" in each for each in weak)
    return outcome


def _load_for(
    stage: Stage, weakness: str, seconds: float, clients: int
) -> tuple[list[str], int, dict[str, float | int | str]]:
    served = serve(stage, weakness)
    violations: list[str] = []
    load = Load(served, lambda number: stage.directory / f"journal{number}")
    aborted = itertools.count()
    stop = time.monotonic() + seconds

    def break_off(number: int) -> None:
        chance = random.Random(number)
        with served.client() as client:
            while time.monotonic() < stop:
                try:
                    with client.query_stream(
                        question_for(chance.randrange(4000)), collection=NAME, policy="map"
                    ) as stream:
                        for _ in itertools.islice(stream, chance.randrange(4)):
                            pass
                    next(aborted)
                except MemKVError as error:
                    if error.status not in (503,):
                        violations.append(f"{error.status} {error.code}: {error.detail}")

    def damage(_: int) -> None:
        while time.monotonic() < stop:
            time.sleep(1.0)
            files = sorted(Path(stage.data_dir, "blocks").glob("*/*.kv"))
            for path in files[:: max(1, len(files) // 3)]:
                try:
                    data = bytearray(path.read_bytes())
                    data[-1] ^= 1
                    replace_bytes(path, data)
                except OSError:
                    pass  # it was deleted meanwhile

    with served.client() as client:
        client.collections.get_or_create(NAME)
        for number in range(10):
            client.documents.upsert(NAME, f"d{number}", text=document_text([number * 7]))
        _, fds_before = _size_of(served.child.pid)
        writers = max(1, clients * 7 // 10)
        load.start(writers, seed=6, writes=0.4)
        readers = max(1, clients - writers)
        warm = threading.Timer(seconds / 4, lambda: sizes.append(_size_of(served.child.pid)))
        sizes: list[tuple[int, int]] = []
        warm.start()
        work = [break_off] * readers + [damage]
        _in_threads(len(work), lambda number: work[number](number), violations, seconds + 120)
        load.stop()
        warm.join()
        violations += load.violations + _idle(client)
        time.sleep(1.0)
        sizes.append(_size_of(served.child.pid))
        for _ in range(100):  # what was accepted last is still made ready
            leftover = os.listdir(stage.data_dir / "tmp")
            if not leftover:
                break
            time.sleep(0.1)
        else:
            violations.append(f"temporary files leak: {len(leftover)}")
    (rss_warm, fds_warm), (rss, fds) = sizes
    if fds > fds_before + _SPARE_FDS:
        violations.append(f"descriptors leak: {fds_before} became {fds}")
    if rss > rss_warm * 1.02:
        violations.append(f"memory grows: {rss_warm >> 20} MB became {rss >> 20} MB")
    served.child.kill()
    requests = sum(load.done.values()) + next(aborted)
    return (
        violations,
        requests,
        {
            "seconds": seconds,
            "rss warm MB": rss_warm >> 20,
            "rss end MB": rss >> 20,
            "fds before": fds_before,
            "fds under load": fds_warm,
            "fds end": fds,
            "refused": sum(load.refused.values()),
        },
    )


def _size_of(pid: int) -> tuple[int, int]:
    """Resident bytes and open descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))
