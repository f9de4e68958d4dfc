"""The thread that owns a device: its lanes, their turns, and who is told what came of it.

loop       prepare  ─►  submit one step of one lane  ─►  prepare  ─►  collect its tokens  ─►  send
prepare    do what was posted, settle every lane (expire, admit, promote): while the device computes
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from memkv.config import EngineConfig
from memkv.engine.failure import typed_error
from memkv.engine.fair_share import FairShare
from memkv.engine.lane import Lane
from memkv.engine.loader import Loader
from memkv.engine.model_runner import ModelRunner
from memkv.engine.scheduler import Task
from memkv.engine.stats import EngineStats
from memkv.engine.threads import Threads, use_threads
from memkv.engine.work import Agenda, Outbox, Work
from memkv.errors import EngineClosed, MemKVError
from memkv.kv.layout import KVLayout

_log = logging.getLogger(__name__)
_LOOK_AGAIN_SECONDS = 0.5  # whether the thread that was asked still lives
Outcome = TypeVar("Outcome")


class DeviceThread:
    """Methods above the line may be called from any thread.

    Args:
        row_width: elements of a token's row of the model, for finding the best number of CPU threads.
        poison: for tests; what is not written reads as NaN.

    Attributes:
        lanes: by layout, each made when it is first needed. Other threads only look at them.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, row_width: int, *, poison: bool) -> None:
        self.lanes: dict[KVLayout, Lane] = {}
        self._runner = runner
        self._config = config
        self._row_width = row_width
        self._poison = poison
        self._agenda = Agenda()
        self._outbox = Outbox()
        self._loader = Loader()
        self._turns: FairShare[tuple[KVLayout, str]] = FairShare()
        self._threads = Threads(0, 0)
        self._changed = threading.Condition()  # guards what follows
        self._tasks: dict[Task, KVLayout] = {}  # everything submitted and not finished
        self._closing = False
        self._death: BaseException | None = None
        self._stats = EngineStats(alive=True, threads=self._threads, lanes=())
        self._thread = threading.Thread(target=self._run, name="memkv-engine", daemon=True)
        self._thread.start()

    @property
    def num_tasks(self) -> int:
        """Submitted and not finished."""
        return len(self._tasks)

    def num_blocks(self, layout: KVLayout) -> int:
        """Of the lane of a layout."""
        return self._config.pool_bytes // layout.bytes_per_block

    def stats(self) -> EngineStats:
        """As of the end of the last step."""
        return replace(self._stats, alive=self._thread.is_alive() and not self._closing)

    def submit(self, task: Task, layout: KVLayout) -> None:
        """Raises `EngineClosed`."""
        with self._changed:
            if self._closing or self._death is not None:
                raise self._closed_error()
            self._tasks[task] = layout
            try:
                admit = partial(self.with_lane, layout, lambda lane: lane.submit(task))
                self._agenda.post(Work(admit, lambda: (task,)))
            except EngineClosed:
                del self._tasks[task]
                raise self._closed_error() from None

    def cancel(self, task: Task) -> None:
        """Does nothing once it is finished."""
        with suppress(EngineClosed):  # it has ended already
            self._agenda.post(Work(partial(self._cancel_now, task), lambda: (task,)))

    def post(self, work: Callable[[], None]) -> None:
        """Does something between two steps, if there are any more."""
        with suppress(EngineClosed):
            self._agenda.post(Work(work, lambda: ()))

    def run(self, work: Callable[[], Outcome]) -> Outcome:
        """Does something between two steps and waits for it. Raises what it raises, and `EngineClosed`."""
        done: Future[Outcome] = Future()

        def settle() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001  # it is the caller's
                done.set_exception(error)

        self._agenda.post(Work(settle, lambda: ()))
        while not wait((done,), timeout=_LOOK_AGAIN_SECONDS).done:
            if not self._thread.is_alive() and not done.done():
                raise self._closed_error()
        return done.result()

    def check_integrity(self) -> None:
        """Asserts between two steps that every block is accounted for."""

        def check() -> None:
            for lane in self.lanes.values():
                lane.check_integrity()

        try:
            self.run(check)
        except EngineClosed:
            self._thread.join()
            check()

    def close(self, drain_seconds: float) -> None:
        """Takes no more tasks, gives those it has time to finish, ends the rest with `EngineClosed`."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._tasks or not self._thread.is_alive(), drain_seconds)
        self._agenda.close()
        self._thread.join()
        self._loader.close()

    def _closed_error(self) -> EngineClosed:
        if self._death is None:
            return EngineClosed("the engine is closed")
        error = EngineClosed(
            f"the engine's thread died: {type(self._death).__name__}: {self._death}",
            hint="restart the server",
        )
        error.__cause__ = self._death
        return error

    # ---- In the thread itself

    def with_lane(self, layout: KVLayout, use: Callable[[Lane], None]) -> None:
        """Calls `use` with the lane of a layout, which is made where there is none."""
        if layout not in self.lanes:
            self.lanes[layout] = Lane(
                layout,
                self.num_blocks(layout),
                self._runner,
                self._config,
                self._loader,
                self._agenda,
                self._outbox,
                poison=self._poison,
            )
        use(self.lanes[layout])

    def _run(self) -> None:
        try:
            if self._runner.device.type == "cuda":
                torch.cuda.set_device(self._runner.device)
            self._threads = use_threads(self._config.threads, self._row_width)
            while not self._agenda.is_closed:
                self._loop_once()
        except BaseException as error:  # noqa: BLE001  # the thread's top: everyone is told why
            _log.critical("the engine's thread died", exc_info=True)
            self._death = error
        finally:
            self._end()

    def _loop_once(self) -> None:
        self._prepare()
        stepped = self._step()
        self._send()
        if not stepped:
            deadline = min((lane.next_deadline() for lane in self.lanes.values()), default=float("inf"))
            self._agenda.wait(max(0.0, deadline - time.monotonic()))

    def _prepare(self) -> None:
        for work in self._agenda.take_posted():  # no more: others may post on and on
            self._do(work)
        settled = False
        while not settled:  # what follows may let somebody run
            now = time.monotonic()
            for lane in self.lanes.values():
                lane.settle(now)
            settled = not self._follow_up()

    def _step(self) -> bool:
        """One step of the lane and kind whose turn it is; False where there is nothing to compute."""
        ready = [(layout, "generation") for layout, lane in self.lanes.items() if lane.has_generations]
        shared = any(lane.awaits_generation for lane in self.lanes.values())
        ready += [(layout, "fill") for layout, lane in self.lanes.items() if lane.has_fills]
        if not ready:
            return self._collect() or self._await_moves()
        turn = self._turns.choose(ready)
        lane = self.lanes[turn[0]]
        started = time.monotonic()
        self._do(lane.generation_work() if turn[1] == "generation" else lane.fill_work(shared=shared))
        self._collect(lane if turn[1] == "generation" else None)
        self._follow_up()
        self._turns.charge(turn, time.monotonic() - started)
        return True

    def _collect(self, ahead: Lane | None = None) -> bool:
        """Hands out tokens that steps have sampled; False where there were none to wait for.

        Args:
            ahead: the lane of which generations were submitted last: nobody waits for their tokens yet.
        """
        lanes = self.lanes.values()
        works = [work for lane in lanes if (work := lane.collect_work(is_last=lane is not ahead))]
        if works:
            self._prepare()
        for work in works:
            self._do(work)
        self._follow_up()
        return bool(works)

    def _await_moves(self) -> bool:
        """Where nothing is left to compute; False where no chunk is on its way either."""
        moving = [lane for lane in self.lanes.values() if lane.is_moving]
        for lane in moving:
            lane.await_moves()
        self._follow_up()
        return bool(moving)

    def _follow_up(self) -> bool:
        """Whether there was anything to do."""
        work = first = self._agenda.next_follow_up()
        while work is not None:
            self._do(work)
            work = self._agenda.next_follow_up()
        return first is not None

    def _do(self, work: Work) -> None:
        """The top of everything that a request can make fail."""
        try:
            work.run()
        except Exception as error:  # noqa: BLE001  # one request's failure must not be another's
            if not isinstance(error, MemKVError):
                _log.exception("a step failed")
            for task in work.scope():
                self._fail(task, typed_error(error))

    def _cancel_now(self, task: Task) -> None:
        lane = self._lane_of(task)
        if lane is not None and not task.is_finished:
            lane.cancel(task)

    def _fail(self, task: Task, error: MemKVError) -> None:
        if task.is_finished:
            return
        lane = self._lane_of(task)
        if lane is None:  # it could not be made
            self._outbox.finish(task, error)
        else:
            lane.fail(task, error)

    def _lane_of(self, task: Task) -> Lane | None:
        layout = self._tasks.get(task)
        return None if layout is None else self.lanes.get(layout)

    def _send(self) -> None:
        """Publishes the state of things, then tells the consumers: what they see next is not older."""
        finished = self._outbox.take_finished()
        self._publish()
        if finished:
            with self._changed:
                for task in finished:
                    self._tasks.pop(task, None)
                self._changed.notify_all()
        self._outbox.send()

    def _publish(self) -> None:
        self._stats = EngineStats(
            alive=True,
            threads=self._threads,
            lanes=tuple(lane.stats() for lane in self.lanes.values()),
        )

    def _end(self) -> None:
        """Nobody is left waiting: whatever is not finished ends with `EngineClosed`."""
        self._agenda.close()
        with self._changed:
            self._closing = True
            tasks = list(self._tasks)
        for task in tasks:
            try:
                self._fail(task, self._closed_error())
            except Exception:  # noqa: BLE001  # its books are broken; the consumer is told all the same
                _log.exception("blocks of a request could not be given back")
                self._outbox.finish(task, self._closed_error())
        try:
            self._follow_up()
            for lane in self.lanes.values():
                lane.end()
            self._follow_up()
        except Exception:  # noqa: BLE001  # a device that failed; the consumers are told all the same
            _log.exception("what was on its way did not come to an end")
        self._send()
