"""Progress on stderr: bars on a terminal, lines elsewhere, nothing when quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memkv.cli.output import Output, printable, stderr_is_terminal

if TYPE_CHECKING:
    from memkv.wire import Job

Tell = Callable[[str], None]


@contextmanager
def steps(out: Output) -> Iterator[Tell]:
    """A spinner beside what is being done now; the function it yields changes the words."""
    if out.quiet or not stderr_is_terminal():
        yield out.note
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        yield lambda words: status.update(Text(printable(words)))


class Bar:
    """One bar: how much of a whole is done."""

    def __init__(self, update: Callable[[float, float, str], None]) -> None:
        self._update = update

    def __call__(self, done: float, total: float, words: str) -> None:
        self._update(done, total, words)

    def job(self, job: Job) -> None:
        """Follows a job: what it does now, and how far that is."""
        stage = job.progress.stage or job.status
        self._update(job.progress.done, job.progress.total, f"{stage} {job.progress.unit}".strip())


@contextmanager
def bar(out: Output, words: str) -> Iterator[Bar]:
    """A bar that is told (done, total, words)."""
    if out.quiet or not stderr_is_terminal():
        yield Bar(lambda done, total, words: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(words, total=None)

        def update(done: float, total: float, now: str) -> None:
            progress.update(task, completed=done, total=total or None, description=now)

        yield Bar(update)
