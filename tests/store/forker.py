"""Children that are killed, forked from a process that has imported everything: a script is both ends of it.

Forker(script).run(...)        in the test
serve(run_child)               in the script
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIGKILLED = -9


class Forker:
    """Requests are lines of JSON on the script's standard input, replies are exit statuses."""

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, **request: Any) -> int:
        """The child's exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def serve(run_child: Callable[[dict[str, Any]], None]) -> None:
    """Runs each request in a child of its own."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_child(json.loads(line))
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
