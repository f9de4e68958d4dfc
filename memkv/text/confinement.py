"""A process that gives up the network and the making of other processes, for good: seccomp, on Linux."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Machine:
    """Attributes:
    audit: the kernel's number for the architecture.
    refused: numbers of socket, io_uring_setup, clone, clone3, execve, execveat, and of fork and vfork.
    """

    audit: int
    refused: tuple[int, ...]


_MACHINES = {
    "x86_64": _Machine(0xC000003E, (41, 425, 56, 435, 59, 322, 57, 58)),
    "aarch64": _Machine(0xC00000B7, (198, 425, 220, 435, 221, 281)),
}
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # offsets in what a filter looks at
_OTHER_ABI = 0x40000000  # numbers from here on: the calls of x86-64 in another guise
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # of prctl


def confine() -> str:
    """Confines this process and all its later threads. Empty, or why the platform does not allow it."""
    machine = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        return f"not known on {platform.system()} on {platform.machine()}"
    program = _program(machine)
    steps = ctypes.create_string_buffer(program, len(program))
    wanted = struct.pack("@HP", len(program) // 8, ctypes.addressof(steps))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, wanted, 0, 0)):
        if prctl(*arguments) != 0:
            return f"seccomp is refused: {os.strerror(ctypes.get_errno())}"
    return ""


def why_not() -> str:
    """What `confine` says, of a process made to ask it."""
    ask = f"from {__name__} import confine; print(confine())"
    done = subprocess.run([sys.executable, "-P", "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"a process ended with status {done.returncode}"


def _program(machine: _Machine) -> bytes:
    """Reads the architecture and the call's number, and refuses those calls as not permitted."""
    count = len(machine.refused)
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 0, count + 3, machine.audit),  # another architecture: to the last step
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, count + 1, 0, _OTHER_ABI),
        *((_IF_EQUAL, count - index, 0, number) for index, number in enumerate(machine.refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
