"""Some disk space that is given up when a full disk would keep a deletion from making room."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from memkv.errors import InsufficientStorageError

RESERVE_BYTES = 4 << 20  # what the log of a large deletion takes

Result = TypeVar("Result")


class SpaceReserve:
    """A file of `RESERVE_BYTES` beside the data, where the disk has room for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fill()

    def fill(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(OSError):
            fd = os.open(self._path, flags, 0o600)
            try:
                os.posix_fallocate(fd, 0, RESERVE_BYTES)
            finally:
                os.close(fd)

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
