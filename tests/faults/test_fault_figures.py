"""Every figure of the fault campaign with a few repetitions; `make faults` runs them whole.

Each comes with its negative control: the same with a protection off must be noticed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest
from campaign import postgres
from fault_place import POSTGRESQL, SQLITE, Outcome, Place, Unavailable
from figure_damage import damaged_blocks, damaged_indexes
from figure_disk import full_disk, power_cuts
from figure_fingerprint import matrix
from figure_kills import kill_everywhere
from figure_migrations import migrations
from figure_random import compound, random_kills
from figure_serving import forgotten, healed, leaks, readiness, small_pool

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def sqlite_place() -> Iterator[Place]:
    yield from _place(SQLITE)


@pytest.fixture(scope="module")
def postgres_place() -> Iterator[Place]:
    yield from _place(POSTGRESQL)


def _place(database: str) -> Iterator[Place]:
    try:
        if database == POSTGRESQL:
            postgres()
        place = Place(database, postgres)
    except (Unavailable, FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no faults can be made here: {error}")
    with place:
        yield place


def holds(figure: Callable[..., Outcome], place: Place, **few: object) -> Outcome:
    try:
        outcome = figure(place, **few)
    except Unavailable as error:
        pytest.skip(str(error))
    assert outcome.violations == []
    assert outcome.runs > 0
    assert outcome.control_detected
    assert all(outcome.control_detected.values()), outcome.control_detected
    return outcome


def test_kills_at_calls_that_change_something(sqlite_place: Place) -> None:
    holds(kill_everywhere, sqlite_place, stride=61, pieces=("ingest", "start"))


def test_kills_on_postgresql(postgres_place: Place) -> None:
    holds(kill_everywhere, postgres_place, stride=151, pieces=("ingest",))


def test_random_kills_under_load(sqlite_place: Place) -> None:
    holds(random_kills, sqlite_place, kills=3, clients=4)


def test_power_cuts(sqlite_place: Place) -> None:
    holds(power_cuts, sqlite_place, cuts=3)


def test_damaged_block_files(sqlite_place: Place) -> None:
    holds(damaged_blocks, sqlite_place, bits=60, pages=20, lengths=20, swaps=10)


def test_damaged_index_files(postgres_place: Place) -> None:
    holds(damaged_indexes, postgres_place, files=30)


def test_a_changed_fingerprint(sqlite_place: Place) -> None:
    assert holds(matrix, sqlite_place, questions=2).notes["fields"] == 20


def test_nothing_leaks(sqlite_place: Place) -> None:
    holds(leaks, sqlite_place, seconds=6.0, clients=8)


def test_a_small_pool(sqlite_place: Place) -> None:
    holds(small_pool, sqlite_place, queries=40, impossible=5, rounds=1)


def test_readiness(sqlite_place: Place) -> None:
    holds(readiness, sqlite_place, chunks=300)


def test_a_full_disk(sqlite_place: Place) -> None:
    holds(full_disk, sqlite_place, sizes=16, step=16384)


def test_killed_migrations(postgres_place: Place) -> None:
    holds(migrations, postgres_place, stride=9)


def test_what_is_forgotten_is_not_seen(sqlite_place: Place) -> None:
    holds(forgotten, sqlite_place, seconds=12.0, clients=12)


def test_destroyed_blocks_heal_under_load(sqlite_place: Place) -> None:
    holds(healed, sqlite_place, seconds=9.0, documents=30, clients=3)


def test_a_fault_within_the_recovery_from_another(sqlite_place: Place) -> None:
    holds(compound, sqlite_place, pairs=3)
