"""A confined process makes no socket and no other process, and goes on with everything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memkv.text.confinement import why_not

CODE = """
import os, socket, subprocess, sys, threading
from memkv.text.confinement import confine
{confined}
def attempt(name, what):
    try:
        what()
    except PermissionError:
        print(name, "refused")
    except RuntimeError:  # a thread that cannot start
        print(name, "refused")
    else:
        print(name, "done")
attempt("socket", lambda: socket.socket().close())
attempt("datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close())
attempt("program", lambda: subprocess.run(["true"]))
attempt("fork", lambda: os.fork() or os._exit(0))
attempt("thread", lambda: threading.Thread(target=int).start())
attempt("file", lambda: open("/proc/self/status").close())
attempt("memory", lambda: bytearray(1 << 20))
"""


@pytest.fixture(autouse=True)
def possible() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("is_confined", [True, False])
def test_what_is_refused(tmp_path: Path, is_confined: bool) -> None:
    code = CODE.format(confined="assert confine() == ''" if is_confined else "")
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    found = dict(line.split() for line in done.stdout.splitlines())
    outcome = "refused" if is_confined else "done"
    assert found == {
        **dict.fromkeys(("socket", "datagram", "program", "fork", "thread"), outcome),
        "file": "done",
        "memory": "done",
    }
