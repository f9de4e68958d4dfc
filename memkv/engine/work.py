"""Units of the engine thread's work, and what consumers get when they are done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from memkv.engine.generation import Generation, GenerationResult, TokenEvent
from memkv.engine.prefill import Computed, PrefillJob
from memkv.engine.scheduler import Task
from memkv.errors import EngineClosed, MemKVError


@dataclass(frozen=True, slots=True)
class Work:
    """`run` is called once; where it raises, the tasks of `scope` fail and the engine goes on."""

    run: Callable[[], None]
    scope: Callable[[], Iterable[Task]]


class Agenda:
    """What the engine's thread has to do next. Any thread may `post`; the others belong to the engine's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._posted: deque[Work] = deque()
        self._follow_ups: deque[Work] = deque()
        self._closed = False

    def post(self, work: Work) -> None:
        """Does something before the next step. Raises `EngineClosed`."""
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine is closed")
            self._posted.append(work)
            self._changed.notify()

    def follow(self, work: Work) -> None:
        """Does something right behind the current work, before anything posted."""
        self._follow_ups.append(work)

    def take_posted(self) -> list[Work]:
        """All that was posted so far, in order; what is posted from now on waits for the next call."""
        with self._changed:
            posted = list(self._posted)
            self._posted.clear()
            return posted

    def next_follow_up(self) -> Work | None:
        return self._follow_ups.popleft() if self._follow_ups else None

    def wait(self, seconds: float) -> None:
        """Sleeps until something is posted, the agenda is closed, or time is up."""
        with self._changed:
            if not self._posted and not self._closed:
                self._changed.wait(min(seconds, threading.TIMEOUT_MAX))

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


class Outbox:
    """What consumers get when the current step is over and its blocks are accounted for."""

    def __init__(self) -> None:
        self._letters: deque[Callable[[], None]] = deque()
        self._finished: list[Task] = []

    def token(self, generation: Generation, event: TokenEvent) -> None:
        self._letters.append(partial(generation.deliver, event))

    def computed(self, job: PrefillJob, event: Computed) -> None:
        self._letters.append(partial(job.events.put, event))

    def finish(self, task: Task, outcome: GenerationResult | MemKVError | None) -> None:
        """The last letter to a task; None for a job that is done or that nobody waits for."""
        task.is_finished = True
        self._finished.append(task)
        if isinstance(task, PrefillJob):
            if isinstance(outcome, MemKVError):
                self._letters.append(partial(task.events.put, outcome))
        else:
            assert outcome is not None, "bug: a generation ended without a result"
            self._letters.append(partial(task.generation.finish, outcome))

    def take_finished(self) -> list[Task]:
        finished, self._finished = self._finished, []
        return finished

    def send(self) -> None:
        while self._letters:
            self._letters.popleft()()
