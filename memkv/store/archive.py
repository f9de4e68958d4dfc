"""An archive of collections: a plain tar that any program reads, and that is trusted in nothing.

    manifest.json             format, who wrote it when, the settings of each collection
    collections/0000.jsonl    its documents, one JSON object a line
    vectors/0000.f32          the vectors of their chunks, in order: float32, little-endian
    kv/<input key>.<digest>.kv    block files, where they were asked for
    digests.json              xxh3-128 of every member before it

Reading takes two passes: `ArchiveReader` looks at every member and every byte before it hands anything out.
Nothing is unpacked: members are read from the tar, and no name in it becomes a path.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import xxhash

from memkv.errors import BadRequestError, ConfigError
from memkv.store.durable_files import storage_error, sync_directory

FORMAT_VERSION = 1
MAX_MEMBERS = 1_000_000
MAX_MANIFEST_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 30

_MANIFEST, _DIGESTS = "manifest.json", "digests.json"
_NAME = re.compile(
    r"^(manifest\.json|digests\.json|collections/[0-9]{4}\.jsonl|vectors/[0-9]{4}\.f32|kv/[0-9a-f]{64}\.[0-9a-f]{32}\.kv)\Z"
)
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
_PIECE = 1 << 20


class ArchiveWriter:
    """Writes to a name beside `path`, which takes that of `path` when it is whole and durable.

    What a killed writer of the same `path` left there is removed. Raises ConfigError where `path` exists or
    cannot be written, InsufficientStorageError on a full disk.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise ConfigError(f"{path} exists", hint="choose another name, or remove it")
        self._path = path
        _remove_left_behind(path)
        self._part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
        self._digests: dict[str, str] = {}
        try:
            self._file = self._part.open("xb")
            fcntl.flock(self._file, fcntl.LOCK_EX)  # as long as this process lives
        except OSError as error:
            raise ConfigError(
                f"{self._part} cannot be written: {error.strerror}", hint="choose another place"
            ) from error
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def add(self, name: str, data: bytes | memoryview) -> None:
        """A member with these bytes."""
        self.add_file(name, io.BytesIO(data), len(data))

    def add_file(self, name: str, source: Any, size: int) -> None:
        """A member read from a binary file."""
        assert _NAME.match(name) and name not in self._digests, "bug: no name of a member"
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o600
        reader = _Digesting(source)
        try:
            self._tar.addfile(member, reader)
        except OSError as error:
            raise storage_error(error) from error
        self._digests[name] = reader.digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise storage_error(failure) from failure
        finally:
            self._file.close()
            with suppress(OSError):
                self._part.unlink()

    def _finish(self) -> None:
        self.add(_DIGESTS, json.dumps(self._digests).encode())
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        os.link(self._part, self._path)
        sync_directory(self._path.parent)


def _remove_left_behind(path: Path) -> None:
    """Drafts of `path` that nobody writes any more: their writers' locks ended with them."""
    draft = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}\.part\Z")
    with suppress(OSError):
        for name in filter(draft.match, os.listdir(path.parent)):
            with suppress(OSError), path.with_name(name).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.with_name(name).unlink()


class ArchiveReader:
    """An archive whose every member was looked at and whose every byte is what was written.

    Raises:
        BadRequestError: it is no archive of memkv's, or a damaged one; what is wrong with it is said.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise BadRequestError(
                f"{path} cannot be read: {error.strerror}", hint="check the path"
            ) from error
        try:
            self._tar = tarfile.open(fileobj=self._file, mode="r:")  # noqa: SIM115  # never a compressed one
            self._members = self._checked_members()
            self.manifest = self._checked_manifest()
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as error:
            self._file.close()
            raise _refused(f"it is no tar that memkv wrote: {error}") from error
        except BaseException:
            self._file.close()
            raise

    def names(self, folder: str) -> list[str]:
        """Members under `collections/` or `kv/`, in order of their names."""
        return sorted(name for name in self._members if name.startswith(folder))

    def read(self, name: str, *, limit: int = MAX_LINE_BYTES) -> bytes:
        """A member's bytes. Raises BadRequestError for one that is not there, or larger than `limit`."""
        member = self._members.get(name)
        if member is None:
            raise _refused(f"{name} is missing")
        if member.size > limit:
            raise _refused(f"{name} has {member.size} bytes, more than {limit}")
        return self.open(name).read()

    def head(self, name: str, size: int) -> bytes:
        """The first bytes of a member."""
        return self.open(name).read(size)

    def open(self, name: str) -> IO[bytes]:
        """A member, to be read from its beginning. Raises BadRequestError for one that is not there."""
        if name not in self._members:
            raise _refused(f"{name} is missing")
        source = self._tar.extractfile(self._members[name])
        assert source is not None, "bug: only plain files were let in"
        return source

    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a member."""
        source = self.open(name)
        while line := source.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise _refused(f"{name} has a line of more than {MAX_LINE_BYTES} bytes")
            yield line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _checked_members(self) -> dict[str, tarfile.TarInfo]:
        found: dict[str, tarfile.TarInfo] = {}
        while (member := self._tar.next()) is not None:
            if member.type not in _PLAIN or member.issparse():
                raise _refused(f"member {len(found) + 1} is no plain file")
            if not _NAME.match(member.name):
                raise _refused(f"member {len(found) + 1} has a name that memkv does not write")
            if member.name in found:
                raise _refused(f"{member.name} is there twice")
            if len(found) == MAX_MEMBERS:
                raise _refused(f"it has more than {MAX_MEMBERS} members")
            found[member.name] = member
        return found

    def _checked_manifest(self) -> dict[str, Any]:
        self._check_digests()
        manifest = json.loads(self.read(_MANIFEST, limit=MAX_MANIFEST_BYTES))
        if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
            raise _refused("its format is not known to this memkv")
        return manifest

    def _check_digests(self) -> None:
        digests = json.loads(self.read(_DIGESTS))
        if not isinstance(digests, dict) or {*digests, _DIGESTS} != set(self._members):
            raise _refused("its members are not those that were written")
        for name, wanted in digests.items():
            reader = _Digesting(self.open(name))
            while reader.read(_PIECE):
                pass
            if reader.digest.hexdigest() != wanted:
                raise _refused(f"the bytes of {name} are not those that were written")


class _Digesting:
    """A binary file that is hashed as it is read."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.digest = xxhash.xxh3_128()

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._source.read(size)
        self.digest.update(data)
        return data


def _refused(what: str) -> BadRequestError:
    return BadRequestError(f"the archive is refused: {what}", hint="export it again: memkv store export FILE")
