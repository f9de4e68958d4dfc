"""G1: kill -9 at every call that changes something, of every piece of a store's life."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fault_closed import CLOSED
from fault_life import DAMAGED, LIVED_ON, PIECES
from fault_place import SQLITE, Outcome, Place, Stage, Unavailable
from fault_process import SIGKILLED

_CONTROLS = {  # protection off -> the piece that must notice
    "rows_before_files": "ingest",
    "files_before_rows_go": "evict",
    "restore_forgets_the_log": "restore",
}

_KILLS_A_STORE = 60


def kill_everywhere(place: Place, *, stride: int = 1, pieces: tuple[str, ...] = tuple(PIECES)) -> Outcome:
    """Every `stride`-th call."""
    outcome = Outcome()
    for piece in pieces:
        killed = _kill_piece(place, piece, stride, outcome.violations)
        outcome.runs += killed
        outcome.notes[piece] = killed
    for weakness, piece in _CONTROLS.items():
        if piece not in pieces:
            continue
        outcome.control_detected[weakness] = _is_noticed(place, weakness, piece)
    return outcome


def kill_closed(place: Place, *, stride: int = 1, pieces: tuple[str, ...] = tuple(CLOSED)) -> Outcome:
    """The same of backup, restore and downgrade."""
    if place.database != SQLITE:
        raise Unavailable("PostgreSQL's own programs write and read its copies")
    return kill_everywhere(place, stride=stride, pieces=pieces)


def _kill_piece(place: Place, piece: str, stride: int, violations: list[str]) -> int:
    """Kills later and later until the piece comes to its end.

    A store serves for some kills, for it grows with each: what a compaction has to do would never end.
    """
    calls = itertools.count(1, stride)
    for stores in itertools.count():
        with place.store() as stage:
            killed = _kill_on(stage, piece, itertools.islice(calls, _KILLS_A_STORE), violations)
        if killed < _KILLS_A_STORE or len(violations) > 20:
            return stores * _KILLS_A_STORE + killed
    raise AssertionError("bug: counting ends")


def _kill_on(stage: Stage, piece: str, calls: Iterable[int], violations: list[str]) -> int:
    """Every kill meets what the last one left; returns how many there were until the piece ended."""
    stage.prepare(piece, 0)
    how = {"damaged": piece in DAMAGED, "downgraded": piece == "downgrade", "unharmed": piece != "start"}
    killed = at = 0
    for at in calls:
        if piece in LIVED_ON:  # one process checks what the last kill left and meets the next one
            checked = stage.check_and_live(piece, killed, at, **how)
            is_killed = checked.killed
            violations += [f"{piece}, before call {at}: {each}" for each in checked.found]
        else:
            status = stage.nursery.run(
                "fault_life:live", **stage.arguments, piece=piece, round_=killed, at=at
            )  # fmt: skip
            is_killed = status == SIGKILLED
            if status not in (0, SIGKILLED):
                violations.append(f"{piece}, call {at}: ended with {status}: {stage.nursery.last_words(400)}")
            violations += [f"{piece}, call {at}: {each}" for each in stage.check(piece, killed + 1, **how)]
        if not is_killed or len(violations) > 20:
            break
        killed += 1
    if piece in LIVED_ON:
        violations += [f"{piece}, call {at}: {each}" for each in stage.check(**how)]
    return killed


def _is_noticed(place: Place, weakness: str, piece: str) -> bool:
    """Whether the check finds what a kill breaks with one protection off."""
    with place.store() as stage:
        stage.prepare(piece, 0)
        for at in range(1, 400, 1 if piece in CLOSED else 4):
            status = stage.nursery.run(
                "fault_life:live", weakness, **stage.arguments, piece=piece, round_=at, at=at
            )
            if stage.check(weakness=weakness):
                return True
            if status != SIGKILLED:
                return False
            stage.prepare(piece, at)
    return False
