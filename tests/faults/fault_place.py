"""What a figure of the campaign works with, and what it reports."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fault_process import SIGKILLED, Nursery
from postgres_server import PostgresServer

SQLITE, POSTGRESQL = "sqlite", "postgresql"


class Unavailable(Exception):
    """This machine does not allow what the figure needs; it is left out and says why."""


@dataclass(slots=True)
class Outcome:
    """Of one figure on one database.

    Attributes:
        runs: faults tried.
        violations: promises found broken, in words.
        control_detected: whether the same with a protection off was noticed, for each protection.
        notes: what was measured besides.
    """

    runs: int = 0
    violations: list[str] = field(default_factory=list)
    control_detected: dict[str, bool] = field(default_factory=dict)
    notes: dict[str, float | int | str] = field(default_factory=dict)


class Place:
    """A directory in memory, a nursery of processes, and one database server. A context manager.

    Attributes:
        ending: once it is set, a figure that repeats one kind of fault ends with the fault in hand.
    """

    def __init__(
        self, database: str, postgres: Callable[[], PostgresServer], root: Path | None = None
    ) -> None:
        self.database = database
        self.root = Path(tempfile.mkdtemp(prefix="memkv-faults-", dir=root or "/dev/shm"))
        self.nursery = Nursery(self.root)
        self._postgres = postgres
        self.ending = threading.Event()

    def repetitions(self, count: int) -> Iterator[int]:
        """0 .. count - 1, or fewer where the figure is to end."""
        return itertools.takewhile(lambda _: not self.ending.is_set(), range(count))

    @contextmanager
    def store(self) -> Iterator[Stage]:
        """A fresh data directory, and a fresh database where that is apart."""
        name = None
        url = None
        if self.database == POSTGRESQL:
            name = self._postgres().create_database()
            url = self._postgres().url(name)
        directory = self.root / uuid.uuid4().hex[:8]
        directory.mkdir()
        try:
            yield Stage(self.nursery, directory, url)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            if name is not None:
                self._postgres().drop_database(name)

    def __enter__(self) -> Place:
        self.nursery.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.nursery.__exit__()
        shutil.rmtree(self.root, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Checked:
    """Attributes:
    found: violations.
    killed: whether the process was, in what it did after the check.
    """

    found: list[str]
    killed: bool


@dataclass(slots=True)
class Stage:
    """One store under test, its journal beside it."""

    nursery: Nursery
    directory: Path
    url: str | None

    @property
    def data_dir(self) -> Path:
        return self.directory / "data"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    @property
    def arguments(self) -> dict[str, str | None]:
        """Of the functions in `fault_life`."""
        return {"data_dir": str(self.data_dir), "url": self.url, "journal": str(self.journal)}

    def check(self, then: str | None = None, round_: int = 0, weakness: str = "", **how: bool) -> list[str]:
        """The violations that `fault_life.check` finds; it prepares for the piece `then` afterwards."""
        return self.check_and_live(then, round_, 0, weakness, **how).found

    def check_and_live(
        self, then: str | None, round_: int, at: int, weakness: str = "", *, damaged: bool = False,
        downgraded: bool = False, unharmed: bool = False,
    ) -> Checked:  # fmt: skip
        """Goes on with that piece in the same process, which is killed at its call `at`."""
        result = self.directory / "result"
        result.unlink(missing_ok=True)
        status = self.nursery.run(
            "fault_life:check", weakness,
            **self.arguments, result=str(result), then=then, round_=round_, at=at, damaged=damaged,
            downgraded=downgraded, unharmed=unharmed,
        )  # fmt: skip
        if result.exists():
            found: list[str] = json.loads(result.read_text())
        else:
            found = []
        if status not in (0, SIGKILLED if at else 0):
            found.append(f"the check failed: {self.nursery.last_words(600)}")
        return Checked(found, status == SIGKILLED)

    def prepare(self, piece: str, round_: int) -> None:
        status = self.nursery.run("fault_life:prepare", **self.arguments, piece=piece, round_=round_)
        assert status == 0, self.nursery.last_words()
