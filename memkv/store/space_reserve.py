"""Some disk space that is given up when a full disk would keep memkv from opening, or from making room."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from memkv.errors import InsufficientStorageError

RESERVE_BYTES = 4 << 20  # what the log of a large deletion takes

_GRAIN = 64 << 10
_SCARCE_BYTES = 1 << 20  # with less, a database may not open: its log and the log's index take some

Result = TypeVar("Result")


class SpaceReserve:
    """A file of up to `RESERVE_BYTES` beside the data, as far as the disk has room for it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self, *, leaving: int = 0) -> None:
        """Takes the room that there is; none of the last `leaving` bytes."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(OSError):
            size = min(RESERVE_BYTES, (self._free() - leaving) // _GRAIN * _GRAIN - _GRAIN)
            if size <= 0:
                return
            fd = os.open(self._path, flags, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)

    def give_way(self) -> None:
        """Gives the reserve up where the disk is full, so that the database opens: for reading, too."""
        with suppress(OSError):
            if self._free() < _SCARCE_BYTES:
                self._path.unlink()

    def spend_on(self, deletion: Callable[[], Result]) -> Result:
        """`deletion`, tried again with the reserve given up if the disk is full.

        Raises InsufficientStorageError where that was not enough either.
        """
        try:
            return deletion()
        except InsufficientStorageError:
            with suppress(OSError):
                self._path.unlink()
            return deletion()

    def _free(self) -> int:
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize
