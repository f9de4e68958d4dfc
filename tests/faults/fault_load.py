"""A served store, and clients that put, ask and delete at once, each with documents of its own."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_journal import Journal
from fault_life import NAME
from fault_model import document_text, notes_of, question_for
from fault_place import Stage
from fault_process import Child

from memkv.errors import APIConnectionError, DocumentNotFound, MemKVError, NotFoundError
from memkv.sdk import MemKV
from memkv.wire import QueryResponse


@dataclass(slots=True)
class Served:
    """A server process and where it answers."""

    child: Child
    url: str
    seconds: float  # from the fork to the first answer

    def client(self, timeout: float = 60.0) -> MemKV:
        return MemKV(self.url, timeout=timeout, max_retries=0)


def serve(stage: Stage, weakness: str = "", /, **changes: Any) -> Served:
    """Starts a server on the stage's store. Raises AssertionError where it ends instead."""
    started = stage.directory / "started"
    started.unlink(missing_ok=True)
    begun = time.monotonic()
    child = stage.nursery.start(
        "fault_server:serve", weakness,
        data_dir=str(stage.data_dir), url=stage.url, started=str(started), **changes,
    )  # fmt: skip
    while not started.exists():
        status = child.poll()
        assert status is None, f"the server ended with {status}: {stage.nursery.last_words()}"
        assert time.monotonic() < begun + 60, "the server does not start"
        time.sleep(0.005)
    return Served(child, started.read_text(), time.monotonic() - begun)


def wrong_answer(response: QueryResponse) -> str:
    """Empty where the answer names what it should, and nothing else."""
    named = [note for chunk in response.chunks for note in notes_of(chunk.text)]
    if not response.chunks:
        return ""
    expected = "".join(f" {note:04d}" for note in named)
    return "" if response.answer == expected else f"a wrong answer: {response.answer!r} for {named}"


@dataclass(slots=True)
class Load:
    """Clients in threads; leave `run` to end them.

    Attributes:
        refused: refusals by their code.
        latencies: of questions, in seconds, with the time of each.
    """

    served: Served
    journal_for: Callable[[int], Path]
    violations: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, clients: int, seed: int, *, writes: float = 0.6) -> None:
        for number in range(clients):
            thread = threading.Thread(target=self._client, args=(number, seed, writes), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
            if thread.is_alive():
                self.violations.append("a request hangs")

    def _client(self, number: int, seed: int, writes: float) -> None:
        chance = random.Random(seed * 100 + number)
        journal = Journal(self.journal_for(number))
        try:
            with self.served.client() as client:
                while not self._stop.is_set():
                    name = f"client{number}-{chance.randrange(4)}"
                    with suppress(_Gone):
                        self._act(client, journal, chance, number, name, writes)
        except APIConnectionError:
            pass  # the server was killed
        finally:
            journal.close()

    def _act(
        self, client: MemKV, journal: Journal, chance: random.Random, number: int, name: str, writes: float
    ) -> None:
        kind = chance.random()
        notes = [number * 500 + chance.randrange(500) for _ in range(chance.randrange(1, 4))]
        notes = list(dict.fromkeys(notes))
        if kind < writes * 0.7:
            journal.begin(name, notes)
            self._call(
                "put", lambda: client.documents.upsert(NAME, name, text=document_text(notes), wait=False)
            )
            journal.done(name, notes)
        elif kind < writes:
            journal.begin(name, None)
            self._call("delete", lambda: client.documents.delete(NAME, name))
            journal.done(name, None)
        else:
            begun = time.monotonic()
            policy = chance.choice(("map", "exact", "head:1"))
            response = self._call(
                "ask", lambda: client.query(question_for(notes[0]), collection=NAME, policy=policy)
            )
            self.latencies.append((begun, time.monotonic() - begun))
            wrong = wrong_answer(response)
            if wrong:
                self.violations.append(wrong)

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            result = call()
        except DocumentNotFound:
            if what != "delete":
                raise
            result = None  # nothing to delete
        except APIConnectionError:
            raise
        except NotFoundError as error:
            self.violations.append(f"{what}: {error.code}: {error.detail}")
            raise _Gone from error
        except MemKVError as error:
            self.refused[error.code] += 1
            if error.status not in (503, 507, 409):
                self.violations.append(f"{what}: {error.status} {error.code}: {error.detail}")
            raise _Gone from error
        self.done[what] += 1
        return result


class _Gone(Exception):
    """A request that was refused; the client goes on."""
