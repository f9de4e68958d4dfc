"""The bridge from the event loop to the synchronous `Memory`: a bounded number of threads, a bounded wait.

A call holds its thread until it returns, whatever became of the client that asked for it. Generations may
hold at most three quarters of the threads, so that listing and deleting go on while the engine is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from memkv.api.drain import Drain

from memkv.config import ServerConfig
from memkv.errors import EngineClosed, Overloaded

if TYPE_CHECKING:
    from memkv.memory import Memory

T = TypeVar("T")


class MemoryCalls:
    """Runs calls on a memory in worker threads.

    Args:
        memory: the memory of this server.
        config: `threads` calls run at once; a further one waits `queue_seconds` and is then refused.
        drain: once it is cut, whoever waits for a call gets `EngineClosed`.
    """

    def __init__(self, memory: Memory, config: ServerConfig, drain: Drain) -> None:
        self.memory = memory
        self.drain = drain
        self._config = config
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="memkv-api")
        self._look_ups = ThreadPoolExecutor(2, thread_name_prefix="memkv-api-key")
        self._probes = ThreadPoolExecutor(1, thread_name_prefix="memkv-api-probe")
        self._cancels = ThreadPoolExecutor(4, thread_name_prefix="memkv-api-cancel")
        self._slots = asyncio.Semaphore(config.threads)
        self._generation_slots = asyncio.Semaphore(max(1, config.threads - config.threads // 4))

    async def run(self, call: Callable[[Memory], T]) -> T:
        """`call(memory)` in a worker thread.

        Raises:
            Overloaded: no thread became free in time.
            EngineClosed: the server stops.
        """
        return await self._finish(await self._start(lambda: call(self.memory)))

    async def probe(self, call: Callable[[Memory], T]) -> T:
        """`call(memory)` in the thread that is kept for probes: it answers however busy the server is."""
        return await asyncio.wrap_future(self._probes.submit(call, self.memory))

    async def look_up(self, call: Callable[[Memory], T]) -> T:
        """`call(memory)`, a short one, in threads that are kept for it: who may ask nothing takes no thread
        from those who may.
        """
        return await asyncio.wrap_future(self._look_ups.submit(call, self.memory))

    async def start_generation(self, work: Callable[[], None]) -> None:
        """Starts `work` in a worker thread and returns; raises `Overloaded` if none becomes free in time."""
        await self._start(work, self._generation_slots)

    def cancel(self, close: Callable[[], None]) -> None:
        """Runs `close` in a thread of its own: cancelling waits for no other call."""
        self._cancels.submit(close)

    def close(self) -> None:
        """Lets no further call start. Running ones end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._look_ups.shutdown(wait=False, cancel_futures=True)
        self._probes.shutdown(wait=False, cancel_futures=True)
        self._cancels.shutdown(wait=False)

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.close()

    async def _start(self, work: Callable[[], T], *more_slots: asyncio.Semaphore) -> Future[T]:
        slots = (*more_slots, self._slots)
        taken: list[asyncio.Semaphore] = []
        loop = asyncio.get_running_loop()

        def release() -> None:
            for slot in taken:
                slot.release()

        def release_from_thread(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the slots with it
                loop.call_soon_threadsafe(release)

        future: Future[T] | None = None
        try:
            async with asyncio.timeout(self._config.queue_seconds):
                for slot in slots:
                    await slot.acquire()
                    taken.append(slot)
            future = self._threads.submit(contextvars.copy_context().run, work)
        except TimeoutError as error:
            raise Overloaded(
                f"all {self._config.threads} threads were busy for {self._config.queue_seconds:g} s",
                hint="try again; or raise server.threads",
            ) from error
        finally:
            if future is None:
                release()
        future.add_done_callback(release_from_thread)
        return future

    async def _finish(self, future: Future[T]) -> T:
        """The future's result, unless the server has to stop first."""
        result = asyncio.wrap_future(future)
        cut = asyncio.ensure_future(self.drain.wait_cut())
        try:
            await asyncio.wait((result, cut), return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise EngineClosed("the server stopped before the answer was there", hint="try again later")
            return result.result()
        finally:
            cut.cancel()
            if not result.done():
                result.add_done_callback(_retrieve)  # its error, if any, has no reader left


def _retrieve(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()
