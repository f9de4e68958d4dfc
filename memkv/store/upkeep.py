"""What an operator does to a store: look at its files, collect garbage, make room, look into quarantine.

Everything here only removes what is derived: a key whose KV is gone is prefilled again when it is used.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from memkv.errors import ConflictError
from memkv.store.block_file import file_name
from memkv.store.catalog import Catalog
from memkv.store.chunk_store import ChunkStore
from memkv.store.database import Database
from memkv.store.rows import CollectionRow, KVFileRow
from memkv.store.space_reserve import SpaceReserve
from memkv.store.vector_index import VectorIndexes

_MOST_OF_A_STORE = 0.2  # more garbage than this share of all files is a wrong database more often than not
_FEW_FILES = 16  # so many may go without a word
_BATCH = 256  # files evicted between two looks at whether to go on

Tell = Callable[[int, int], None]  # files so far and in all; what it raises ends the work between two of them


def tell_nobody(done: int, total: int) -> None:
    """For those who do not ask how far the work is."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed, or would be.

    Attributes:
        released: keys that may be resident in an engine's pool and are to be dropped there.
        failed: files that could not be removed.
    """

    files: int
    bytes: int
    bytes_before: int
    bytes_after: int
    failed: int = 0
    released: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QuarantinedFile:
    """A file that was set aside, and why; empty where nothing was written down."""

    name: str
    kind: str
    detail: str
    time: str
    bytes: int


class Upkeep:
    """Thread-safe. Raises DatabaseUnavailable, DatabaseDamaged, InsufficientStorageError, StoreFenced."""

    def __init__(
        self,
        data_dir: Path,
        database: Database,
        catalog: Catalog,
        chunks: ChunkStore,
        indexes: VectorIndexes,
        reserve: SpaceReserve,
    ) -> None:
        self._data_dir = data_dir
        self._quarantine = data_dir / "quarantine"
        self._database = database
        self._catalog = catalog
        self._chunks = chunks
        self._indexes = indexes
        self._reserve = reserve  # rows go even on a full disk

    def collect_garbage(
        self, *, dry_run: bool = False, force: bool = False, on_progress: Tell = tell_nobody
    ) -> Removed:
        """Removes files whose key nothing refers to, files that no row names, and indexes of no collection.

        What a job published that is not done yet is left alone.

        Raises:
            ConflictError: most of the store would go, and `force` does not say so.
        """
        unused, orphans = self._catalog.unused_files(), self._chunks.orphans()
        indexes = self._stray_indexes()
        files = [row.num_bytes for row in unused] + [orphan.num_bytes for orphan in orphans]
        files += [_size(path) for path in indexes]
        before = self.disk_bytes()
        if dry_run:
            return Removed(len(files), sum(files), before, before - sum(files))
        self._require_few(len(unused) + len(orphans), force)
        with self._making_room():
            on_progress(0, len(files))
            released = self._reserve.spend_on(self._chunks.release_all_unused)
            on_progress(len(released), len(files))
            removed = self._chunks.orphans(remove=True)
            gone = len(released) + sum(orphan.removed for orphan in removed) + sum(map(_unlink, indexes))
            self._reserve.spend_on(self._catalog.forget_uses)
        after = self.disk_bytes()
        keys = tuple(row.input_key for row in released)
        return Removed(gone, max(0, before - after), before, after, max(0, len(files) - gone), keys)

    def require_little_garbage(self) -> None:
        """Raises ConflictError where `collect_garbage` would without `force`."""
        self._require_few(len(self._catalog.unused_files()) + len(self._chunks.orphans()), False)

    def evict(
        self,
        collection: CollectionRow | None = None,
        *,
        to_bytes: int = 0,
        dry_run: bool = False,
        on_progress: Tell = tell_nobody,
    ) -> Removed:
        """Removes KV, what was used longest ago first, until at most `to_bytes` are left of chunks' files.

        Of one collection or of all; prefixes' KV stays. Texts and vectors stay: it is prefilled again on use.
        """
        rows = self._catalog.collections_files(None if collection is None else collection.id)
        chosen = _first_to_go(rows, to_bytes)
        size = sum(row.num_bytes for row in chosen)
        before = self.disk_bytes()
        if dry_run:
            return Removed(len(chosen), size, before, before - size)
        with self._making_room():
            for first in range(0, len(chosen), _BATCH):
                on_progress(first, len(chosen))
                batch = chosen[first : first + _BATCH]
                self._reserve.spend_on(functools.partial(self._chunks.evict, batch))
        left = {orphan.name for orphan in self._chunks.orphans()}
        failed = sum(file_name(row.input_key, row.file_digest) in left for row in chosen)
        after = self.disk_bytes()
        keys = tuple(row.input_key for row in chosen)
        return Removed(len(chosen) - failed, max(0, before - after), before, after, failed, keys)

    def quarantined(self) -> list[QuarantinedFile]:
        """What is set aside, the oldest first."""
        found = []
        with suppress(OSError), os.scandir(self._quarantine) as entries:
            for entry in entries:
                if not entry.name.endswith(".json"):
                    reason = _read_reason(self._quarantine / f"{entry.name}.json")
                    found.append(
                        QuarantinedFile(
                            name=entry.name,
                            kind=str(reason.get("kind", ""))[:500],
                            detail=str(reason.get("detail", ""))[:500],
                            time=str(reason.get("time", ""))[:500],
                            bytes=_size(Path(entry.path)),
                        )
                    )
        return sorted(found, key=lambda file: (file.time, file.name))

    def purge_quarantine(self, *, dry_run: bool = False, on_progress: Tell = tell_nobody) -> Removed:
        """Removes what is set aside, and the reasons."""
        files = self.quarantined()
        before = self.disk_bytes()
        size = sum(file.bytes for file in files)
        if dry_run:
            return Removed(len(files), size, before, before - size)
        gone = 0
        for done, file in enumerate(files):
            on_progress(done, len(files))
            # The reason first: one whose file is gone would be found, and removed, by nobody.
            _unlink(self._quarantine / f"{file.name}.json")
            gone += _remove(self._quarantine / file.name)
        after = self.disk_bytes()
        return Removed(gone, max(0, before - after), before, after, len(files) - gone)

    def compact(self, *, dry_run: bool = False) -> Removed:
        """Gives the space of deleted rows back to the disk. Block files need none: each is removed whole."""
        before, unused = self._database.size(), self._database.unused_bytes()
        if dry_run:
            return Removed(0, unused, before, before - unused)
        self._database.compact()
        after = self._database.size()
        return Removed(0, max(0, before - after), before, after)

    def unneeded_bytes(self) -> int:
        """Of files that nothing refers to and files that no row names: what a repair removes."""
        unused, orphans = self._catalog.unused_files(), self._chunks.orphans()
        return sum(row.num_bytes for row in unused) + sum(orphan.num_bytes for orphan in orphans)

    def disk_bytes(self) -> int:
        """Bytes of everything under blocks/, indexes/ and quarantine/."""
        return sum(_tree_bytes(self._data_dir / name) for name in ("blocks", "indexes", "quarantine"))

    @contextmanager
    def _making_room(self) -> Iterator[None]:
        """Takes the reserve again afterwards, whatever became of it."""
        try:
            yield
        finally:
            self._reserve.fill()

    def _stray_indexes(self) -> list[Path]:
        known = self._catalog.collection_ids()
        found: list[Path] = []
        with suppress(OSError):
            found = [p for p in (self._data_dir / "indexes").glob("col_*.vectors") if p.stem not in known]
        return sorted(found)

    def _require_few(self, num_files: int, force: bool) -> None:
        """Raises ConflictError where so many of the store's files would go."""
        rows, _ = self._catalog.kv_totals()
        unused = len(self._catalog.unused_files())
        every = rows + num_files - unused  # orphans have no row
        if not force and num_files > _FEW_FILES and num_files > _MOST_OF_A_STORE * every:
            raise ConflictError(
                f"{num_files} of {every} block files would be removed; that many are seldom garbage",
                hint="is this the right database? See with --dry-run; --force removes them",
            )


def _first_to_go(rows: Sequence[KVFileRow], to_bytes: int) -> list[KVFileRow]:
    left = sum(row.num_bytes for row in rows)
    chosen = []
    for row in rows:
        if left <= to_bytes:
            break
        left -= row.num_bytes
        chosen.append(row)
    return chosen


def _tree_bytes(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        total += sum(_size(Path(folder, name)) for name in names)
    return total


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _remove(path: Path) -> bool:
    """A file, or a directory that stood in the place of one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    return _unlink(path)


def _read_reason(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
