"""Archives that a server writes and reads: plain files in `archives/` of its data directory.

A name is one file there and never a path, so that whoever may ask a server for a copy can neither read nor
write anything else of its machine.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from memkv.errors import BadRequestError, ConfigError, ConflictError, NotFoundError
from memkv.store.durable_files import storage_error, sync_directory
from memkv.wire import ARCHIVE_PATTERN

_NAME = re.compile(ARCHIVE_PATTERN)


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    name: str
    bytes: int
    time: str  # when it was last written


class Archives:
    """Of one data directory; the folder is made when it is first written to."""

    def __init__(self, data_dir: Path) -> None:
        self._root = data_dir / "archives"

    def vacant(self, name: str) -> Path:
        """Where a new archive would go. Raises BadRequestError where that is no name, ConflictError."""
        path = self._path(name)
        if os.path.lexists(path):
            raise ConflictError(f"the archive {name} exists", hint="choose another name, or delete it")
        return path

    def for_writing(self, name: str) -> Path:
        """The same, with the folder made.

        Raises:
            BadRequestError, ConflictError: as `vacant`.
            ConfigError, InsufficientStorageError: the folder cannot be made, or is a link.
        """
        path = self.vacant(name)
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            if not stat.S_ISDIR(self._root.lstat().st_mode):
                raise ConfigError("archives/ of the data directory is a link", hint="make it a directory")
        except OSError as error:
            raise storage_error(error) from error
        return path

    def existing(self, name: str) -> Path:
        """Raises BadRequestError, NotFoundError; a link, a pipe or a directory counts as not there."""
        path = self._path(name)
        if not _is_plain(path):
            raise NotFoundError(
                f"there is no archive {name}",
                hint="put the file into archives/ of the server's data directory",
            )
        return path

    def list(self) -> list[ArchiveFile]:
        """In order of their names."""
        found: list[ArchiveFile] = []
        with suppress(OSError), os.scandir(self._root) as entries:
            for entry in entries:
                if _NAME.match(entry.name) and entry.is_file(follow_symlinks=False):
                    state = entry.stat(follow_symlinks=False)
                    written = datetime.fromtimestamp(state.st_mtime, UTC)
                    found.append(
                        ArchiveFile(entry.name, state.st_size, written.isoformat(timespec="seconds"))
                    )
        return sorted(found, key=lambda file: file.name)

    def delete(self, name: str) -> None:
        """Raises BadRequestError, NotFoundError."""
        path = self.existing(name)
        try:
            path.unlink()
            sync_directory(self._root)
        except OSError as error:
            raise storage_error(error) from error

    def _path(self, name: str) -> Path:
        if not _NAME.match(name):
            raise BadRequestError(
                f"{name[:64]!r} is no name of an archive",
                hint="letters, digits, points, lines and underscores, and .tar at the end",
            )
        return self._root / name


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
