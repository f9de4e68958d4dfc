"""What was begun and what was acknowledged, kept by the test: the oracle of what a store must hold."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

State = tuple[int, ...] | None  # a document's notes; None: there is no such document


class Journal:
    """Appends lines to a file; each is there before the call returns, whatever happens to the process."""

    def __init__(self, path: Path | str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def begin(self, name: str, notes: Sequence[int] | None) -> None:
        """A document is about to be put, or deleted (None)."""
        self._say("begin", name, notes)

    def done(self, name: str, notes: Sequence[int] | None) -> None:
        """It was acknowledged."""
        self._say("done", name, notes)

    def close(self) -> None:
        os.close(self._fd)

    def _say(self, word: str, name: str, notes: Sequence[int] | None) -> None:
        line = json.dumps([word, name, None if notes is None else list(notes)]) + "\n"
        # Not os.write: the shim counts calls of the process under test.
        os.writev(self._fd, [line.encode()])


def possible_states(path: Path | str) -> dict[str, set[State]]:
    """For each document the states that it may be in."""
    found: dict[str, set[State]] = {}
    if not Path(path).exists():
        return found
    for line in Path(path).read_text().splitlines():
        word, name, notes = json.loads(line)
        state: State = None if notes is None else tuple(notes)
        if word == "begin":
            found.setdefault(name, {None}).add(state)
        else:
            found[name] = {state}
    return found
