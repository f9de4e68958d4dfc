"""Looking for damage before a query meets it: everything at once when asked, and a little all the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf

from memkv.errors import InsufficientStorageError
from memkv.store.block_file import file_name
from memkv.store.catalog import Catalog
from memkv.store.chunk_store import ChunkStore
from memkv.store.durable_files import Damage
from memkv.store.rows import KVFileRow

_SCRUB_FILES = 64  # read between two looks at the database, or two words to it

UNUSED = Damage("unused", "no chunk and no prefix refers to its key")


@dataclass(frozen=True, slots=True)
class StoreProblem:
    """One thing that is wrong in a store.

    Attributes:
        kind: a Damage kind; `orphan`: no row names the file; `unused`: nothing refers to its key; `database`;
            `index`; `recomputed`: the model makes other KV of these tokens.
        name: of the file, within blocks/, or of the collection.
    """

    kind: str
    name: str
    detail: str
    repaired: bool


@dataclass(slots=True)
class Verified:
    """What a verification found, and how far it came.

    Attributes:
        files, bytes: block files that were looked at; with `full` every byte of them.
        files_left, bytes_left: those that were not for want of time; the next verification begins with them.
    """

    problems: list[StoreProblem] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    files_left: int = 0
    bytes_left: int = 0


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Chunks that were prefilled again, and those of them whose stored KV was another."""

    chunks: int
    problems: list[StoreProblem]


@dataclass(slots=True)
class Scrubbed:
    """What the scrubber saw."""

    files: int = 0
    bytes: int = 0
    damaged: int = 0

    def add(self, other: Scrubbed) -> None:
        self.files += other.files
        self.bytes += other.bytes
        self.damaged += other.damaged


def verify_files(
    chunks: ChunkStore,
    catalog: Catalog,
    *,
    full: bool,
    repair: bool,
    deadline: float = inf,
    on_progress: Callable[[int, int], None] | None = None,
) -> Verified:
    """Compares rows with files: presence, size and mode, and with `full` every byte.

    Those whose bytes were not read for the longest come first; what was read is written down on the way, so
    that a verification that ends early is gone on with by the next one.

    Args:
        repair: bad files go to quarantine with their rows dropped, files that no row names and files whose
            key nothing refers to are unlinked.
        deadline: of `time.monotonic`; no file is begun after it, but for the first.
        on_progress: told (files looked at, files).
    """
    verified = Verified()
    sound: list[KVFileRow] = []
    rows = catalog.files_by_verification()
    for done, row in enumerate(rows):
        if done and time.monotonic() >= deadline:
            verified.files_left = len(rows) - done
            verified.bytes_left = sum(row.num_bytes for row in rows[done:])
            break
        if on_progress is not None:
            on_progress(done, len(rows))
        damage = chunks.check(row, full=full)
        verified.files += 1
        verified.bytes += row.num_bytes
        if damage is None:
            sound.append(row)
        elif catalog.file_for(row.tenant, row.input_key) == row:  # it was not let go of meanwhile
            verified.problems.append(_problem(row, damage, repair and chunks.set_right(row, damage)))
        if full and len(sound) == _SCRUB_FILES:
            _remember(catalog, sound)
            sound.clear()
    if full and sound:
        _remember(catalog, sound)
    unused = catalog.unused_files()
    released = {row.input_key for row in chunks.release_all_unused()} if repair else set()
    verified.problems += [_problem(row, UNUSED, row.input_key in released) for row in unused]
    verified.problems += [
        StoreProblem("orphan", orphan.name, "no row names it", orphan.removed)
        for orphan in chunks.orphans(remove=repair)
    ]
    return verified


def scrub(
    chunks: ChunkStore,
    catalog: Catalog,
    *,
    older_than: timedelta,
    bytes_per_second: int,
    stop: threading.Event,
) -> Scrubbed:
    """Reads files whose bytes were not read for so long, the longest ago first; sets damaged ones aside.

    Ends after some files, or when `stop` is set. Sleeps so that no more than `bytes_per_second` are read.
    """
    seen = Scrubbed()
    sound: list[KVFileRow] = []
    started = time.monotonic()
    for row in catalog.files_to_verify(_SCRUB_FILES, older_than):
        damage = chunks.check(row, full=True)
        seen.files += 1
        seen.bytes += row.num_bytes
        if damage is None:
            sound.append(row)
        else:
            seen.damaged += chunks.set_right(row, damage)
        due = started + seen.bytes / bytes_per_second
        if stop.wait(max(0.0, due - time.monotonic())):
            break
    if sound:
        catalog.mark_verified(sound)
    return seen


def _remember(catalog: Catalog, sound: list[KVFileRow]) -> None:
    with suppress(InsufficientStorageError):  # on a full disk one may still look
        catalog.mark_verified(sound)


def _problem(row: KVFileRow, damage: Damage, repaired: bool) -> StoreProblem:
    return StoreProblem(damage.kind, file_name(row.input_key, row.file_digest), damage.detail, repaired)
