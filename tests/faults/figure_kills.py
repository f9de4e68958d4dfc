"""G1: kill -9 at every call that changes something, of every piece of a store's life."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fault_closed import CLOSED
from fault_life import DAMAGED, LIVED_ON, PIECES
from fault_place import SQLITE, Outcome, Place, Stage, Unavailable
from fault_process import SIGKILLED

_CONTROLS = {  # of each piece, the protection that is switched off
    "ingest": "rows_before_files",
    "delete": "deletes_in_two_steps",
    "gc": "garbage_before_rows_go",
    "compact": "compaction_empties_first",
    "import": "rows_before_files",
    "snapshot": "snapshot_in_place",
    "evict": "files_before_rows_go",
    "reprefill": "rows_before_files",
    "heal": "quarantine_before_row",
    "repair": "quarantine_before_row",
    "purge": "reasons_go_last",
    "start": "recovers_once",
    "backup": "backup_in_place",
    "restore": "restore_forgets_the_log",
    "downgrade": "driver_transactions",
}

_KILLS_A_STORE = 60


def kill_everywhere(place: Place, *, stride: int = 1, pieces: tuple[str, ...] = tuple(PIECES)) -> Outcome:
    """Every `stride`-th call."""
    outcome = Outcome()
    for piece in pieces:
        killed = _kill_piece(place, piece, stride, outcome.violations)
        outcome.runs += killed
        outcome.notes[piece] = killed
        outcome.control_detected |= kill_control(place, piece)
    return outcome


def kill_control(place: Place, piece: str) -> dict[str, bool]:
    """Whether kills of this piece are noticed with its protection off."""
    return {_CONTROLS[piece]: _is_noticed(place, _CONTROLS[piece], piece)}


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


def _kill_on(
    stage: Stage, piece: str, calls: Iterable[int], violations: list[str], weakness: str = ""
) -> int:
    """Every kill meets what the last one left; returns how many there were until the piece ended.

    With a protection off the first violation is enough.
    """
    stage.prepare(piece, 0)
    how = _how(piece)
    enough = 0 if weakness else 20
    killed = at = 0
    for at in calls:
        if piece in LIVED_ON:  # one process checks what the last kill left and meets the next one
            checked = stage.check_and_live(piece, killed, at, weakness, **how)
            is_killed = checked.killed
            violations += [f"{piece}, before call {at}: {each}" for each in checked.found]
        else:
            status = stage.nursery.run(
                "fault_life:live", weakness, **stage.arguments, piece=piece, round_=killed, at=at
            )  # fmt: skip
            is_killed = status == SIGKILLED
            if status not in (0, SIGKILLED):
                violations.append(f"{piece}, call {at}: ended with {status}: {stage.nursery.last_words(400)}")
            found = stage.check(piece, killed + 1, weakness, **how)
            violations += [f"{piece}, call {at}: {each}" for each in found]
        if not is_killed or len(violations) > enough:
            break
        killed += 1
    if piece in LIVED_ON:
        violations += [f"{piece}, call {at}: {each}" for each in stage.check(weakness=weakness, **how)]
    return killed


def _how(piece: str) -> dict[str, bool]:
    """What the check is to expect after it."""
    return {"damaged": piece in DAMAGED, "downgraded": piece == "downgrade", "unharmed": piece != "start"}


def _is_noticed(place: Place, weakness: str, piece: str) -> bool:
    """Whether the check finds what a kill breaks with one protection off."""
    violations: list[str] = []
    with place.store() as stage:
        _kill_on(stage, piece, range(1, 400, 1 if piece in CLOSED else 4), violations, weakness)
    return bool(violations)
