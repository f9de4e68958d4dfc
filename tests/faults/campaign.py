"""The fault campaign, figure by figure: `python tests/faults/campaign.py [FIGURE ...]`, or `make faults`.

Results are kept in results.json beside this file; a figure that has one is skipped unless --again says so.
--scale 0.1 makes a tenth of the repetitions; what was made is what the result says. Ctrl-C ends random kills,
power cuts and compound faults early and keeps what was made, too. Several campaigns, of different figures,
may run at the same time.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "store"), str(HERE.parent)]

from fault_closed import CLOSED  # noqa: E402
from fault_life import PIECES  # noqa: E402
from fault_place import POSTGRESQL, SQLITE, Outcome, Place, Unavailable  # noqa: E402
from figure_damage import damaged_blocks, damaged_indexes  # noqa: E402
from figure_disk import full_disk, power_cuts  # noqa: E402
from figure_fingerprint import matrix  # noqa: E402
from figure_kills import kill_closed, kill_control, kill_everywhere  # noqa: E402
from figure_migrations import migrations  # noqa: E402
from figure_random import compound, random_kills  # noqa: E402
from figure_serving import forgotten, healed, leaks, readiness, small_pool  # noqa: E402
from postgres_server import PostgresServer, find_binaries, start_server  # noqa: E402

RESULTS = HERE / "results.json"
_NOTICED = {True: "yes", False: "NO", None: ""}  # None: a piece whose control is another piece's


@dataclass(frozen=True, slots=True)
class Figure:
    """Attributes:
    full: repetitions at --scale 1, by the argument's name; those that are floats are seconds.
    control: its negative control alone, where that can be had.
    """

    run: Callable[..., Outcome]
    full: dict[str, int | float]
    control: Callable[[Place], dict[str, bool]] | None = None


FIGURES = {
    **{
        f"G1 kill at every call: {piece}": Figure(
            functools.partial(kill_everywhere, pieces=(piece,)),
            {},
            functools.partial(kill_control, piece=piece),
        )
        for piece in PIECES
    },
    **{
        f"G1 of copies: {piece}": Figure(
            functools.partial(kill_closed, pieces=(piece,)), {}, functools.partial(kill_control, piece=piece)
        )
        for piece in CLOSED
    },
    "G1 random kills": Figure(random_kills, {"kills": 500}),
    "G2 power cuts": Figure(power_cuts, {"cuts": 500}),
    "G3 damaged block files": Figure(
        damaged_blocks, {"bits": 10_000, "pages": 1_000, "lengths": 1_000, "swaps": 200}
    ),
    "G4 damaged index files": Figure(damaged_indexes, {"files": 1_000}),
    "G5 fingerprint matrix": Figure(matrix, {"questions": 20}),
    "G6 leaks": Figure(leaks, {"seconds": 1800.0}),
    "G7 small pool": Figure(small_pool, {"rounds": 5}),
    "G8 readiness": Figure(readiness, {"chunks": 10_000}),
    "G12 full disk": Figure(full_disk, {"sizes": 200}),
    "G13 killed migrations": Figure(migrations, {}),
    "G14 forgotten under load": Figure(forgotten, {"seconds": 600.0}),
    "G15 healed under load": Figure(healed, {"seconds": 90.0}),
    "G17 compound faults": Figure(compound, {"pairs": 300}),
}


REPEATED = (random_kills, power_cuts, compound)  # one kind of fault, so that fewer of them are a result


@functools.cache
def postgres() -> PostgresServer:
    binaries = find_binaries()
    if binaries is None:
        raise Unavailable("no PostgreSQL binaries (initdb, pg_ctl)")
    return start_server(binaries)


def run_figure(name: str, place: Place, scale: float) -> dict[str, Any]:
    """One entry of results.json."""
    figure = FIGURES[name]
    sizes: dict[str, int | float] = {
        key: value * scale if isinstance(value, float) else max(1, round(value * scale))
        for key, value in figure.full.items()
    }
    if not figure.full and scale < 1:
        sizes["stride"] = round(1 / scale)
    started = time.monotonic()
    found: dict[str, Any] = {"figure": name, "database": place.database, "sizes": sizes}
    try:
        outcome = figure.run(place, **sizes)
    except Unavailable as error:
        return {**found, "skipped": str(error)}
    except (AssertionError, TimeoutError) as error:  # a server that does not start, a process that hangs
        found_out = f"{type(error).__name__}: {error}"
        outcome = Outcome(violations=[found_out], control_detected={"not come to": False})
    if place.ending.is_set() and figure.run in REPEATED:
        found["sizes"] = dict.fromkeys(figure.full, outcome.runs)
    return {
        **found,
        "runs": outcome.runs,
        "violations": len(outcome.violations),
        "first_violations": outcome.violations[:10],
        "control_detected": all(outcome.control_detected.values()) if outcome.control_detected else None,
        "controls": outcome.control_detected,
        "notes": outcome.notes,
        "seconds": round(time.monotonic() - started),
    }


def kept_results() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return found


def keep(found: dict[str, Any]) -> None:
    """In the place of the last result of its figure; other processes may keep others at the same time."""
    order = list(FIGURES)
    build = HERE.parents[1] / "build"
    build.mkdir(exist_ok=True)
    with (build / "results.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = [each for each in kept_results() if not _is_of(each, found["figure"], found["database"])]
        results = sorted(
            (each for each in [*kept, found] if each["figure"] in order),
            key=lambda each: (order.index(each["figure"]), each["database"] != SQLITE),
        )
        fresh = RESULTS.with_suffix(".new")
        fresh.write_text(json.dumps(results, indent=1) + "\n")
        fresh.rename(RESULTS)


def _is_of(result: dict[str, Any], figure: str, database: str) -> bool:
    return (result["figure"], result["database"]) == (figure, database)


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| figure | database | runs | violations | control detected | seconds |",
        "|---|---|--:|--:|---|--:|",
    ]
    for each in results:
        if "skipped" in each:
            lines.append(f"| {each['figure']} | {each['database']} | not run: {each['skipped']} | | | |")
        else:
            lines.append(
                f"| {each['figure']} | {each['database']} | {each['runs']} | {each['violations']} | "
                f"{_NOTICED[each['control_detected']]} | {each['seconds']} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", help="beginnings of names; all by default")
    parser.add_argument("--database", choices=(SQLITE, POSTGRESQL), help="one of the two")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full repetitions")
    parser.add_argument("--again", action="store_true", help="figures that have a result, too")
    parser.add_argument("--controls", action="store_true", help="only controls that kept results lack")
    asked = parser.parse_args()
    with ExitStack() as opened:
        place_for = functools.cache(lambda name: opened.enter_context(Place(name, postgres)))
        _run_controls(asked, place_for) if asked.controls else _run_all(asked, place_for)
    results = kept_results()
    print(table(results))
    return int(any(each.get("violations") or each.get("control_detected") is False for each in results))


def _run_all(asked: argparse.Namespace, place_for: Callable[[str], Place]) -> None:
    """The figures that are asked for; each result is kept at once."""
    for name, database in _asked_for(asked):
        if not asked.again and any(_is_of(each, name, database) for each in kept_results()):
            continue
        print(f"{name}, {database} ...", flush=True)
        place = place_for(database)
        _end_on_interrupt(place)
        found = run_figure(name, place, asked.scale)
        print(json.dumps(found), flush=True)
        keep(found)
        if place.ending.is_set():
            return


def _end_on_interrupt(place: Place) -> None:
    """The first Ctrl-C ends the figure, the second one the campaign."""

    def end(*_: object) -> None:
        place.ending.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, end)


def _run_controls(asked: argparse.Namespace, place_for: Callable[[str], Place]) -> None:
    """Of the kept results that are asked for and have none."""
    for name, database in _asked_for(asked):
        control = FIGURES[name].control
        for kept in kept_results():
            if not _is_of(kept, name, database) or kept.get("controls") != {} or control is None:
                continue
            print(f"{name}, {database}, control ...", flush=True)
            detected = control(place_for(database))
            print(json.dumps(detected), flush=True)
            keep({**kept, "control_detected": all(detected.values()), "controls": detected})


def _asked_for(asked: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Figure and database."""
    for name in FIGURES:
        if asked.figures and not any(name.startswith(wanted) for wanted in asked.figures):
            continue
        for database in (SQLITE, POSTGRESQL):
            if asked.database in (None, database):
                yield name, database


if __name__ == "__main__":
    sys.exit(main())
