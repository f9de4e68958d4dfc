"""Processes to kill: forked from one that has imported everything, with the shim that counts and kills.

`Nursery` is used by whoever runs a campaign; `main` is the process that forks. Requests and replies are lines
of JSON on its standard input and output.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
SHIM = HERE.parents[1] / "build" / "fault_shim.so"
SIGKILLED = -signal.SIGKILL
_TESTS = (HERE, HERE.parent / "store", HERE.parent)
_MODULES = (  # what children run, and what that takes long to import
    "fault_server",
    "fault_weaknesses",
    "figure_damage",
    "figure_disk",
    "figure_fingerprint",
    "figure_migrations",
    "memkv.api.serve",
    "sqlalchemy.dialects.postgresql.psycopg",
)


def build_shim() -> Path:
    """Compiled where it is missing or old. Raises CalledProcessError, FileNotFoundError (no compiler)."""
    source = HERE / "fault_shim.c"
    if not SHIM.exists() or SHIM.stat().st_mtime < source.stat().st_mtime:
        SHIM.parent.mkdir(exist_ok=True)
        fresh = SHIM.with_suffix(f".{os.getpid()}")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(fresh), str(source), "-ldl"]
        subprocess.run(command, check=True)
        fresh.rename(SHIM)
    return SHIM


class Child:
    """A forked process. Its exit status is 0 for a function that returned, 1 for one that raised."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self._nursery = nursery
        self.pid = pid
        self.log = log

    def poll(self) -> int | None:
        return self._nursery.ask({"poll": self.pid})["status"]  # type: ignore[no-any-return]

    def wait(self, seconds: float = 120.0) -> int:
        """Raises TimeoutError, after the process was killed: a hang is a violation, never waited out."""
        deadline = time.monotonic() + seconds
        pause = 0.002
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"process {self.pid} hung; see {self.log}")
            time.sleep(pause)
            pause = min(0.01, pause * 1.5)
        self._nursery.forget(self)
        return status

    def kill(self) -> int:
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()


class Nursery:
    """A context manager."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self._log = place / "children.log"
        self._children: list[Child] = []
        environment = {**os.environ, "LD_PRELOAD": str(build_shim()), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._process.stdout.readline())
        return reply

    def start(self, function: str, weakness: str = "", /, **arguments: Any) -> Child:
        """Runs "module:function" with `arguments` in a child; `weakness` names a protection to switch off."""
        reply = self.ask(
            {
                "function": function,
                "arguments": arguments,
                "weakness": weakness,
                "log": str(self._log),
            }
        )
        self._children.append(Child(self, reply["pid"], self._log))
        return self._children[-1]

    def run(self, function: str, weakness: str = "", /, **arguments: Any) -> int:
        return self.start(function, weakness, **arguments).wait()

    def forget(self, child: Child) -> None:
        """It has ended."""
        if child in self._children:
            self._children.remove(child)

    def last_words(self, count: int = 2000) -> str:
        return self._log.read_text(errors="replace")[-count:] if self._log.exists() else ""

    def __enter__(self) -> Self:
        self.ask({})  # answered once everything is imported
        return self

    def __exit__(self, *_: object) -> None:
        for child in list(self._children):
            if child.poll() is None:
                child.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def kill_at(call: int) -> None:
    """This process gets SIGKILL at its `call`-th call from here on that changes something; 0: never."""
    shim().fault_arm(call, 0, 0)


def shim() -> Any:
    """The preloaded shim of this process."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.fault_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]
    library.fault_arm.restype = None
    library.fault_count.restype = ctypes.c_long
    return library


def _run_child(request: dict[str, Any]) -> int:
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        import fault_weaknesses

        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        fault_weaknesses.switch_off(request["weakness"])
        function(**request["arguments"])
    except BaseException:  # noqa: BLE001  # the top of a process
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    sys.path[:0] = [str(place) for place in _TESTS]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever runs the campaign
    for name in _MODULES:
        importlib.import_module(name)
    importlib.import_module("fault_server").warm_up()
    gc.collect()
    gc.freeze()  # a child that looks through all this for garbage copies every page of it: half its time
    requests, replies = sys.stdin, os.fdopen(os.dup(1), "w")
    statuses: dict[int, int] = {}
    for line in requests:
        request = json.loads(line)
        if "poll" in request:
            pid = request["poll"]
            if pid not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            reply = {"status": statuses.get(pid)}
        elif "function" in request:
            child = os.fork()
            if child == 0:
                status = _run_child(request)
                sys.stderr.flush()
                os._exit(status)
            statuses.pop(child, None)  # of an earlier process of the same number
            reply = {"pid": child}
        else:
            reply = {}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
