"""Progress on stderr: bars on a terminal, lines elsewhere, nothing when quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memkv.cli.output import Output, bytes_text, printable, stderr_is_terminal

if TYPE_CHECKING:
    from memkv.wire import Job, JobProgress

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


def progress_text(progress: JobProgress) -> str:
    """How much of how much is done, for people."""
    if progress.unit == "bytes":
        return f"{bytes_text(progress.done)} of {bytes_text(progress.total)}"
    return f"{progress.done} of {progress.total} {progress.unit}".strip()


class Bar:
    """One bar: how much of a whole is done."""

    def __init__(self, update: Callable[[float, float, str], None]) -> None:
        self._update = update

    def __call__(self, done: float, total: float, words: str) -> None:
        self._update(done, total, words)

    def job(self, job: Job) -> None:
        """Follows a job: what it does now, and how far that is."""
        progress = job.progress
        words = f"{progress.stage or job.status}, {progress_text(progress)}"
        self._update(progress.done, progress.total, words)


@contextmanager
def bar(out: Output, words: str) -> Iterator[Bar]:
    """A bar that is told (done, total, words); the words hold the numbers."""
    if out.quiet or not stderr_is_terminal():
        yield Bar(lambda done, total, words: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(words, total=None)

        def update(done: float, total: float, now: str) -> None:
            progress.update(task, completed=done, total=total or None, description=now)

        yield Bar(update)
