"""The names of block files: where they stand, how one appears, where damaged ones go.

    blocks/<aa>/<input key>.<xxh3-128>.kv     0400; <aa> are the key's first two digits
    tmp/<uuid>                                 being written; cleared at every opening
    quarantine/<name>.<random>                 damaged, with a .json beside it that says why

Everything else that stands there is none of ours: it is left alone and stops nothing.
"""

from __future__ import annotations

import json
import os
import stat
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from memkv.errors import ServiceUnavailableError
from memkv.store.block_file import BlockFileIdentity, file_name, parse_file_name, read_block_file
from memkv.store.durable_files import Damage, make_directory, sync_directory, sync_file
from memkv.store.rows import KVFileRow


@dataclass(frozen=True, slots=True)
class Listing:
    """What one look at blocks/ saw."""

    names: frozenset[str]
    unreadable: frozenset[str]  # subdirectories that could not be listed: nothing is known of their files

    def lacks(self, row: KVFileRow) -> bool:
        name = file_name(row.input_key, row.file_digest)
        return name not in self.names and name[:2] not in self.unreadable


class BlockDirectory:
    """Its callers serialise changes of names; reading needs no lock."""

    def __init__(self, data_dir: Path) -> None:
        self.blocks = data_dir / "blocks"
        self._tmp = data_dir / "tmp"
        self._quarantine = data_dir / "quarantine"

    def path(self, row: KVFileRow) -> Path:
        return self.path_of(file_name(row.input_key, row.file_digest))

    def path_of(self, name: str) -> Path:
        return self.blocks / name[:2] / name

    def temporary_path(self) -> Path:
        return self._tmp / uuid.uuid4().hex

    def clear_temporary(self) -> int:
        """Removes what a killed writer left."""
        removed = 0
        with suppress(OSError), os.scandir(self._tmp) as entries:
            for entry in entries:
                with suppress(OSError):
                    os.unlink(entry.path)
                    removed += 1
        return removed

    def list(self) -> Listing:
        names: set[str] = set()
        unreadable: set[str] = set()
        with os.scandir(self.blocks) as entries:
            shards = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for shard in shards:
            try:
                with os.scandir(self.blocks / shard) as entries:
                    names.update(
                        entry.name
                        for entry in entries
                        if entry.name[:2] == shard and parse_file_name(entry.name) is not None
                    )
            except OSError:
                unreadable.add(shard)
        return Listing(frozenset(names), frozenset(unreadable))

    def link(self, draft: Path, row: KVFileRow, identity: BlockFileIdentity) -> bool:
        """Gives a durable draft its final name; False where the same bytes stand there already.

        Damaged bytes under that name go to quarantine first. Raises OSError, ServiceUnavailableError.
        """
        path = self.path(row)
        self._make_shard(path.parent)
        try:
            os.link(draft, path, follow_symlinks=False)
            return True
        except FileExistsError:
            pass
        existing = read_block_file(path, identity, row.file_digest)
        if not isinstance(existing, Damage):
            sync_file(path)
            return False
        if existing.transient:
            raise ServiceUnavailableError(
                f"a block file cannot be read: {existing.detail}", hint="check the disk, then try again"
            )
        self.quarantine(path, existing)
        os.link(draft, path, follow_symlinks=False)
        return True

    def unlink(self, name: str) -> bool:
        """Removes a block file; whether it could."""
        try:
            self.path_of(name).unlink()
        except OSError:
            return False
        return True

    def size_of(self, name: str) -> int:
        """Bytes of a file under blocks/; 0 where there is none."""
        try:
            return self.path_of(name).lstat().st_size
        except OSError:
            return 0

    def restrict(self, row: KVFileRow) -> bool:
        """Leaves a file to its owner alone, for reading; whether it could."""
        try:
            fd = os.open(self.path(row), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            os.fchmod(fd, 0o400)
        finally:
            os.close(fd)
        return True

    def sync_shards(self, rows: Iterable[KVFileRow]) -> None:
        """Makes the names of these files durable. Raises OSError."""
        for directory in {self.path(row).parent for row in rows}:
            sync_directory(directory)

    def quarantine(self, path: Path, damage: Damage) -> bool:
        """Moves whatever stands under a name out of the way and says why beside it; whether it could."""
        kept = self._quarantine / f"{path.name}.{uuid.uuid4().hex[:8]}"
        try:
            os.rename(path, kept)
        except OSError:
            return False
        reason = {
            "name": path.name,
            "kind": damage.kind,
            "detail": damage.detail,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with suppress(OSError):
            kept.with_name(f"{kept.name}.json").write_text(json.dumps(reason), encoding="utf-8")
        return True

    def quarantined(self) -> tuple[int, int]:
        """Files in quarantine and their bytes, reasons not counted."""
        count = total = 0
        with suppress(OSError), os.scandir(self._quarantine) as entries:
            for entry in entries:
                if not entry.name.endswith(".json"):
                    count += 1
                    with suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_size
        return count, total

    def _make_shard(self, shard: Path) -> None:
        make_directory(shard)
        if not stat.S_ISDIR(os.lstat(shard).st_mode):  # a link would lead out of the store
            self.quarantine(shard, Damage("irregular", "not a directory"))
            make_directory(shard)
