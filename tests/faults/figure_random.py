"""G1: kill -9 at random moments under load. G17: a second kill while the first is recovered from."""

from __future__ import annotations

import random
import time

from fault_life import NAME, calls
from fault_load import Load, serve
from fault_place import Outcome, Place, Stage
from fault_process import SIGKILLED


def random_kills(place: Place, *, kills: int = 1_000, clients: int = 8, check_every: int = 5) -> Outcome:
    """On one store throughout."""
    outcome = Outcome()
    slowest = 0.0
    chance = random.Random(11)
    with place.store() as stage:
        for kill in place.repetitions(kills):
            served = serve(stage)
            slowest = max(slowest, served.seconds)
            load = Load(served, lambda number: stage.directory / f"journal{number}")
            with served.client() as client:
                client.collections.get_or_create(NAME)
            load.start(clients, seed=kill)
            time.sleep(chance.uniform(0.1, 1.0))
            served.child.kill()
            load.stop()
            outcome.runs += 1
            outcome.violations += [f"kill {kill}: {each}" for each in load.violations]
            if kill % check_every == check_every - 1:
                _merge_journals(stage)
                outcome.violations += [f"kill {kill}: {each}" for each in stage.check()]
            if len(outcome.violations) > 20:
                break
        _merge_journals(stage)
        outcome.violations += [f"after the last kill: {each}" for each in stage.check()]
        for what, count in load.done.items():
            outcome.notes[f"last {what}"] = count
    outcome.notes["slowest start"] = round(slowest, 2)
    outcome.control_detected["no_requeue"] = _loss_is_noticed(place)
    return outcome


def _merge_journals(stage: Stage) -> None:
    journals = sorted(stage.directory.glob("journal?*"))
    stage.journal.write_text("".join(path.read_text() for path in journals))


def _loss_is_noticed(place: Place) -> bool:
    """A store that does not take up again what a kill interrupted."""
    weakness = "no_requeue"
    with place.store() as stage:
        for attempt in range(10):
            served = serve(stage, weakness)
            with served.client() as client:
                client.collections.get_or_create(NAME)
            load = Load(served, lambda number: stage.directory / f"journal{number}")
            load.start(4, seed=attempt, writes=1.0)
            time.sleep(0.7)
            served.child.kill()
            load.stop()
            _merge_journals(stage)
            if stage.check(weakness=weakness):
                return True
    return False


def compound(place: Place, *, pairs: int = 300) -> Outcome:
    """A kill during an ingest, and a second one while the next process recovers from it and goes on."""
    outcome = Outcome()
    chance = random.Random(17)
    with place.store() as stage:
        stage.prepare("start", 0)
        for pair in place.repetitions(pairs):
            piece = chance.choice(("ingest", "delete", "gc", "evict", "reprefill", "heal"))
            first, second = (chance.randrange(1, calls(stage.url, each)) for each in (piece, "start"))
            for at, next_piece in ((first, piece), (second, "start")):
                status = stage.nursery.run(
                    "fault_life:live", **stage.arguments, piece=next_piece, round_=pair, at=at
                )
                if status not in (0, SIGKILLED):
                    outcome.violations.append(f"pair {pair}: {next_piece} ended with {status}")
            following = chance.choice(("start", "repair", "gc"))
            found = stage.check(then=following, round_=pair + 1, damaged=True)
            outcome.violations += [f"pair {pair} ({piece} {first}, {second}): {each}" for each in found]
            outcome.runs += 1
            if len(outcome.violations) > 20:
                break
    outcome.control_detected["rows_before_files"] = _pair_is_noticed(place)
    return outcome


def _pair_is_noticed(place: Place) -> bool:
    weakness = "rows_before_files"
    with place.store() as stage:
        stage.prepare("start", 0)
        for at in range(2, 200, 8):
            for call, piece in ((at, "ingest"), (at // 2, "start")):
                stage.nursery.run(
                    "fault_life:live", weakness, **stage.arguments, piece=piece, round_=at, at=call
                )
            if stage.check(weakness=weakness):
                return True
    return False
