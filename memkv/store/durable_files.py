"""Writing files so that they survive, and reading files that may be anything.

Written: a new name under tmp/, space reserved first, data, fsync; a failed fsync is never repeated, the file
is discarded. Read: opened without following links or waiting for a writer, checked to be a regular file of
the expected size, read into one buffer; never mapped, for a mapped file that shrinks kills its reader.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memkv.errors import InsufficientStorageError, MemKVError, ServiceUnavailableError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The process or the machine is short of something: says nothing about the file.
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a file's bytes cannot be used. `transient`: the file itself may be sound."""

    kind: str  # missing | irregular | size | unreadable, or what its format's reader found
    detail: str
    transient: bool = False


def write_new_file(path: Path, parts: Sequence[bytes | bytearray | memoryview], *, mode: int) -> None:
    """Writes `parts` to a file that must not exist, durable but for its name.

    Raises:
        InsufficientStorageError: the disk is full. No file is left.
        ServiceUnavailableError: the disk failed. No file is left.
    """
    size = sum(memoryview(part).nbytes for part in parts)
    try:
        fd = os.open(path, _WRITE, mode)
    except OSError as error:
        raise storage_error(error) from error
    try:
        try:
            if size:
                os.posix_fallocate(fd, 0, size)
            _write_all(fd, parts)
            if os.fstat(fd).st_size != size:
                raise OSError(errno.EIO, "short write")
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)
        raise storage_error(error) from error


def replace_file(path: Path, temporary: Path, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    """Puts a durable file in the place of `path`, whole or not at all. Raises as `write_new_file`."""
    write_new_file(temporary, parts, mode=0o600)
    try:
        os.rename(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise storage_error(error) from error


def read_file(path: Path, *, size: int | None = None, limit: int = 1 << 40) -> memoryview | Damage:
    """The bytes of a regular file of exactly `size` bytes (or of any size up to `limit`); never raises.

    While it reads other threads run: memory is not filled first, as a bytearray's is by whoever holds the
    interpreter, 0.1 s for 64 MiB.
    """
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        return _damage(error)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return Damage("irregular", "not a regular file")
        if size is not None and found.st_size != size:
            return Damage("size", f"{found.st_size} bytes, not {size}")
        if found.st_size > limit:
            return Damage("size", f"{found.st_size} bytes, more than {limit}")
        buffer = np.empty(found.st_size, np.uint8).data
        filled = _read_into(fd, buffer)
        if filled != len(buffer):
            return Damage("size", f"{filled} bytes came, not {len(buffer)}")
        return buffer.toreadonly()
    except OSError as error:
        return _damage(error)
    except MemoryError:
        return Damage("unreadable", "no memory for it", transient=True)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Makes the bytes of a file durable that someone else wrote."""
    fd = os.open(path, _READ)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """A directory for its owner alone, durable in its parent, unless it is there."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    sync_directory(path.parent)


def storage_error(error: OSError) -> MemKVError:
    """What a failed write means to a client. Names no path."""
    if error.errno in _FULL:
        return InsufficientStorageError(
            "the disk of the data directory is full; nothing was stored",
            hint="free some space, or delete documents, then retry",
        )
    return ServiceUnavailableError(
        f"writing to the data directory failed: {error.strerror or type(error).__name__}",
        hint="check the disk and the directory's permissions, then retry",
    )


def _write_all(fd: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    for part in parts:
        left = memoryview(part).cast("B")
        while left:
            written = os.write(fd, left)
            left = left[written:]


def _read_into(fd: int, buffer: memoryview) -> int:
    filled = 0
    while filled < len(buffer):
        count = os.readv(fd, [buffer[filled:]])
        if count == 0:
            break
        filled += count
    return filled


def _damage(error: OSError) -> Damage:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Damage("missing", "there is no such file")
    if error.errno in (errno.ELOOP, errno.ENXIO):
        return Damage("irregular", "not a regular file")
    text = error.strerror or type(error).__name__
    return Damage("unreadable", text, transient=error.errno in _TRANSIENT)
