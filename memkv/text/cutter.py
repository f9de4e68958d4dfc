"""Documents cut in a process of its own: one that hangs, eats memory or ends the interpreter fails alone.

The process is started when the first document comes and serves all that follow; after a document that it did
not survive, the next one gets a new process. It is given the tokenizer once, knows neither torch nor the
store, and has no network where the platform can take it away. `python -m memkv.text.cutter FD` is that
process.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from memkv.errors import InternalServerError, ServiceUnavailableError, UnprocessableDocumentError
from memkv.text.chunker import TextChunk, chunk_text
from memkv.text.confinement import confine
from memkv.text.tokenizer import PlainTokenizer, TokenizerState


@dataclass(frozen=True, slots=True)
class CutLimits:
    """For one document. Letters with ten thousand accents, the slowest of what was tried, take 6 s and 300 MB
    for a million characters.

    Attributes:
        seconds, bytes: of CPU time, and of memory besides what the process has at its start.
        characters_per_second, bytes_per_character: what a long document gets on top.
    """

    seconds: float = 10.0
    bytes: int = 512 << 20
    characters_per_second: int = 50_000
    bytes_per_character: int = 1024

    def seconds_for(self, characters: int) -> float:
        return self.seconds + characters / self.characters_per_second

    def bytes_for(self, characters: int) -> int:
        return self.bytes + characters * self.bytes_per_character


class Cutter:
    """`chunk_text` elsewhere. Thread-safe; one document at a time."""

    def __init__(self, tokenizer: PlainTokenizer, limits: CutLimits | None = None) -> None:
        self._tokenizer = tokenizer
        self._limits = limits or CutLimits()
        self._turn = threading.Lock()
        self._process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        process = self._process
        return None if process is None else process.pid

    def cut(self, text: str, title: str, max_tokens: int) -> list[TextChunk]:
        """What `chunk_text` returns.

        Raises:
            UnprocessableDocumentError: it took too long or too much memory, or its process ended.
            InternalServerError: something in `chunk_text` failed.
            ServiceUnavailableError: no process can be started now.
        """
        limits = self._limits
        task = _Task(text, title, max_tokens, limits.seconds_for(len(text)), limits.bytes_for(len(text)))
        with self._turn:
            try:
                done = self._running().ask(task)
            except _Ended as ended:
                self._end()
                raise _refused(str(ended)) from None
        if done.error == MemoryError.__name__:
            raise _refused(f"it takes more than {task.memory >> 20:,} MB of memory")
        if done.error:
            raise InternalServerError(f"the document cannot be cut: {done.error}")
        return [
            TextChunk(ordinal, cut.start, cut.end, text[cut.start : cut.end], cut.label, cut.token_ids)
            for ordinal, cut in enumerate(done.cuts)
        ]

    def close(self) -> None:
        """Ends the process."""
        with self._turn:
            self._end()

    def _running(self) -> _Process:
        if self._process is None or not self._process.is_alive:
            self._end()
            self._process = _Process(self._tokenizer.state)
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None


class _Task(msgspec.Struct, array_like=True):
    text: str
    title: str
    max_tokens: int
    seconds: float
    memory: int


class _Cut(msgspec.Struct, array_like=True):
    start: int
    end: int
    label: str
    token_ids: tuple[int, ...]


class _Done(msgspec.Struct, array_like=True):
    cuts: list[_Cut] = []
    error: str = ""  # the name of an exception


class _Ended(Exception):
    """Why a process is there no more, or has to go."""


class _Process:
    """Messages are MessagePack: the tokenizer's state, answered with nothing; then `_Task` and `_Done`."""

    def __init__(self, state: TokenizerState) -> None:
        self._ours, theirs = Pipe()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_ONE_THREAD},
                    start_new_session=True,  # Ctrl-C in a terminal is for the server alone
                )
        except OSError as error:
            self._ours.close()
            raise _unavailable(error.strerror or type(error).__name__) from error
        try:
            self._exchange(msgspec.msgpack.encode(state), _START_SECONDS)
        except _Ended as ended:
            self.kill()
            raise _unavailable(str(ended)) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: _Task) -> _Done:
        """Raises _Ended."""
        patience = _PATIENCE * task.seconds  # for one that sleeps, or gets no core
        return msgspec.msgpack.decode(self._exchange(msgspec.msgpack.encode(task), patience), type=_Done)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._ours.close()

    def _exchange(self, message: bytes, seconds: float) -> bytes:
        try:
            self._ours.send_bytes(message)
            if self._ours.poll(seconds):
                return self._ours.recv_bytes()
        except (EOFError, OSError):
            status = self._process.wait()
            if status != -signal.SIGXCPU:
                how = f"signal {-status}" if status < 0 else f"status {status}"
                raise _Ended(f"the process that cuts ended with {how}") from None
            raise _Ended("it takes too much CPU time") from None
        raise _Ended(f"nothing comes of it in {seconds:.0f} s")


_PATIENCE = 6.0  # seconds on the clock for a second of CPU time
_START_SECONDS = 60.0  # importing numpy and reading a tokenizer, on a machine that is busy otherwise
# One thread takes no core from the engine, and threads that come later would take address space.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _refused(why: str) -> UnprocessableDocumentError:
    return UnprocessableDocumentError(f"the document cannot be cut: {why}", hint="split it, or leave it out")


def _unavailable(why: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"the process that cuts documents does not start: {why}", hint="retry in a moment; see the log"
    )


def _serve(connection: Connection) -> None:
    """Cuts what is sent until nobody is left to send."""
    tokenizer = PlainTokenizer(msgspec.msgpack.decode(connection.recv_bytes(), type=TokenizerState))
    confine()  # as far as it goes: `memkv doctor` says where it does not
    connection.send_bytes(b"")
    at_start = _address_space()
    while True:
        task = msgspec.msgpack.decode(connection.recv_bytes(), type=_Task)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_AS, at_start + task.memory)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + task.seconds) + 1)
        connection.send_bytes(msgspec.msgpack.encode(_cut(task, tokenizer)))


def _cut(task: _Task, tokenizer: PlainTokenizer) -> _Done:
    try:
        chunks = chunk_text(task.text, task.title, tokenizer, task.max_tokens)
    except Exception as error:  # noqa: BLE001  # the process's top: it goes on with the next document
        return _Done(error=type(error).__name__)
    return _Done([_Cut(chunk.start, chunk.end, chunk.label, chunk.token_ids) for chunk in chunks])


def _limit(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _address_space() -> int:
    """Bytes that this process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as found:
        return int(found.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the server went
        _serve(Connection(int(sys.argv[1])))
