"""The whole store as it was at one moment: a copy of the database, and hard links to the block files.

    snapshots/<id>/manifest.json  database  blocks/<aa>/<name>

Block files are never rewritten, so that a link costs no space until the file itself is let go of. Indexes are
not copied: they are made again from the vectors in the database.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import xxhash

from memkv.errors import ConfigError, NotFoundError
from memkv.store.backup import back_up, restore
from memkv.store.block_file import file_name
from memkv.store.catalog import Catalog
from memkv.store.database import Database, parse_database_url
from memkv.store.durable_files import Damage, read_file, replace_file, storage_error, sync_directory
from memkv.store.ids import new_id
from memkv.store.lock import StoreLock, take_advisory_lock
from memkv.store.restore_journal import remove_journal, write_journal
from memkv.store.restored_keys import put_keys_aside
from memkv.store.rows import JobRow
from memkv.store.upkeep import Tell, tell_nobody

_PIECE = 1 << 20
_ID = re.compile(r"^snp_[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True)
class Snapshot:
    id: str
    time: str
    store_id: str
    dialect: str
    generation: int  # of the store
    kv_files: int
    kv_bytes: int
    database_bytes: int
    database_digest: str = ""  # xxh3-128 of the copy; older memkvs wrote none


class Snapshots:
    """Of an open store."""

    def __init__(self, data_dir: Path, store_id: str, database: Database, catalog: Catalog) -> None:
        self._data_dir = data_dir
        self._root = data_dir / "snapshots"
        self._store_id = store_id
        self._database = database
        self._catalog = catalog
        for part in self._root.glob("*.part"):  # left by a kill
            shutil.rmtree(part, ignore_errors=True)

    def create(self, snapshot_id: str = "", *, on_progress: Tell = tell_nobody) -> Snapshot:
        """A new snapshot, of this id where one is given; where that is made already, it is left as it is.

        Raises ConfigError, DatabaseUnavailable, InsufficientStorageError: no snapshot is left.
        """
        snapshot_id = snapshot_id or new_id("snp")
        if (made := self.find(snapshot_id)) is not None:
            return made
        part = self._root / f"{snapshot_id}.part"
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            part.mkdir(mode=0o700)
            snapshot = self._fill(part, snapshot_id, on_progress)
            os.rename(part, self._root / snapshot_id)
            sync_directory(self._root)
        except OSError as error:
            raise storage_error(error) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return snapshot

    def plan(self) -> Snapshot:
        """What `create` would keep; it has no id."""
        files, size = self._catalog.kv_totals()
        return self._snapshot("", self._catalog.generation(), (files, size, self._database.size()))

    def find(self, snapshot_id: str) -> Snapshot | None:
        """One that is whole."""
        return _read(self._root / snapshot_id)

    def list(self) -> list[Snapshot]:
        """The oldest first."""
        return sorted(_read_all(self._root), key=lambda snapshot: snapshot.id)

    def delete(self, snapshot_id: str) -> None:
        """Raises NotFoundError."""
        path = _find(self._data_dir, snapshot_id)
        part = path.with_name(f"{path.name}.part")
        os.rename(path, part)
        shutil.rmtree(part, ignore_errors=True)

    def _fill(self, part: Path, snapshot_id: str, on_progress: Tell) -> Snapshot:
        generation = self._catalog.generation()
        on_progress(0, self._catalog.kv_totals()[0])
        database_bytes = back_up(self._database, part / "database")
        files = size = 0
        rows = self._catalog.files_of_all_tenants()
        for done, row in enumerate(rows):
            on_progress(done, len(rows))
            name = file_name(row.input_key, row.file_digest)
            shard = part / "blocks" / name[:2]
            shard.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # let go of a moment ago: it is made again where it is needed
                os.link(self._data_dir / "blocks" / name[:2] / name, shard / name, follow_symlinks=False)
                files, size = files + 1, size + row.num_bytes
        snapshot = replace(
            self._snapshot(snapshot_id, generation, (files, size, database_bytes)),
            database_digest=_digest(part / "database"),
        )
        text = json.dumps(asdict(snapshot)).encode()
        replace_file(part / "manifest.json", part / "manifest.part", [text])
        return snapshot

    def _snapshot(self, snapshot_id: str, generation: int, sizes: tuple[int, int, int]) -> Snapshot:
        """Of this moment. `sizes`: block files, their bytes, the database's."""
        kv_files, kv_bytes, database_bytes = sizes
        return Snapshot(
            id=snapshot_id,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            store_id=self._store_id,
            dialect=self._database.dialect,
            generation=generation,
            kv_files=kv_files,
            kv_bytes=kv_bytes,
            database_bytes=database_bytes,
        )


def restore_snapshot(
    data_dir: Path,
    database_url: str | None,
    snapshot_id: str,
    *,
    busy_seconds: float = 5.0,
    dry_run: bool = False,
    job: JobRow | None = None,
) -> Snapshot:
    """Brings a closed store back to a snapshot; what came after it is gone, but for access keys. The next
    opening mends the rest.

    Args:
        dry_run: only look whether it could.
        job: that this store's database knows of, and the restored one will from its next opening on.

    Raises:
        StoreLocked: the store is open.
        NotFoundError, ConfigError: as `check_snapshot` does.
        DatabaseUnavailable: the database could not be replaced; it is as it was.
    """
    data_dir = Path(os.path.abspath(data_dir))
    url = parse_database_url(database_url, data_dir)
    path = _find(data_dir, snapshot_id)
    with ExitStack() as held:
        held.callback(StoreLock(data_dir / "lock").release)
        snapshot = check_snapshot(data_dir, url.get_backend_name(), snapshot_id)
        if dry_run:
            return snapshot
        if url.get_backend_name() != "sqlite":
            database = Database(url, busy_seconds=busy_seconds)
            held.callback(database.close)
            take_advisory_lock(database, held, patience=busy_seconds)
        with closing(Database(url, busy_seconds=busy_seconds)) as going:
            put_keys_aside(going, data_dir)
        remove_journal(data_dir) if job is None else write_journal(data_dir, job)
        _link_back(path / "blocks", data_dir / "blocks")  # first: files without rows harm nobody
        restore(url, path / "database")
    return snapshot


def check_snapshot(data_dir: Path, dialect: str, snapshot_id: str) -> Snapshot:
    """A snapshot that a store on such a database can be brought back to; the store may be open.

    Raises:
        NotFoundError: there is no such snapshot.
        ConfigError: it is of another store, or of another kind of database, or damaged.
    """
    path = _find(data_dir, snapshot_id)
    snapshot = _read(path)
    if snapshot is None:
        raise ConfigError("the snapshot's manifest is damaged", hint="use another one, or a backup")
    if snapshot.store_id != _store_id(data_dir):
        raise ConfigError("the snapshot is of another store", hint="check --data-dir")
    if snapshot.dialect != dialect:
        raise ConfigError(
            f"the snapshot is of a database of kind {snapshot.dialect}", hint="check MEMKV_DATABASE_URL"
        )
    if snapshot.database_digest not in ("", _digest(path / "database")):
        raise ConfigError("the snapshot's database is damaged", hint="use another one, or a backup")
    return snapshot


def _digest(path: Path) -> str:
    """xxh3-128 of a file; of one that cannot be read, of nothing."""
    digest = xxhash.xxh3_128()
    with suppress(OSError), path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _link_back(kept: Path, blocks: Path) -> None:
    shards: set[Path] = set()
    try:
        for source in kept.glob("*/*.kv"):
            shard = blocks / source.parent.name
            shards.add(shard)
            shard.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileExistsError):
                os.link(source, shard / source.name, follow_symlinks=False)
        for directory in (*shards, blocks):
            sync_directory(directory)
    except OSError as error:
        raise storage_error(error) from error


def _find(data_dir: Path, snapshot_id: str) -> Path:
    path = data_dir / "snapshots" / snapshot_id
    if not _ID.match(snapshot_id) or not path.is_dir():
        raise NotFoundError(f"there is no snapshot {snapshot_id[:64]!r}", hint="memkv store snapshot list")
    return path


def _read_all(root: Path) -> Iterator[Snapshot]:
    with suppress(OSError):
        for path in root.iterdir():
            if _ID.match(path.name) and (found := _read(path)) is not None:
                yield found


def _read(path: Path) -> Snapshot | None:
    data = read_file(path / "manifest.json", limit=65_536)
    if isinstance(data, Damage):
        return None
    try:
        found = Snapshot(**json.loads(bytes(data)))
    except (ValueError, TypeError):
        return None
    return found if found.id == path.name else None


def _store_id(data_dir: Path) -> str | None:
    data = read_file(data_dir / "STORE", limit=4096)
    with suppress(ValueError, TypeError, KeyError):
        return None if isinstance(data, Damage) else str(json.loads(bytes(data))["store_id"])
    return None
