"""A chunk store for measurements, as a source of the engine's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from memkv.engine.loader import NUM_THREADS
from memkv.engine.residency import ChunkRef
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout
from memkv.store.chunk_store import LoadTimes, PublishItem
from memkv.store.store import Store

_FINGERPRINT = "0" * 64
_WRITERS = 4


class BenchStore:
    """Chunks of one layout in files of their own; a `KVSource`.

    Attributes:
        loads: of all that was read so far.
    """

    def __init__(self, directory: Path) -> None:
        self.loads: list[LoadTimes] = []
        self._store = Store.open(directory)
        self._store.chunks.on_load = self.loads.append
        self._blocks = directory / "blocks"
        self._layout: KVLayout | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.close()

    def publish(self, items: Sequence[tuple[ChunkRef, ChunkKV]]) -> None:
        """Writes and syncs chunks."""
        self._layout = items[0][1].layout
        self._store.chunks.publish(
            [
                PublishItem(ref.input_key, _FINGERPRINT, ref.context_ids, ref.token_ids, kv)
                for ref, kv in items
            ]
        )

    def read(self, ref: ChunkRef) -> ChunkKV | None:
        if self._layout is None:
            return None
        return self._store.chunks.load(
            ref.input_key,
            fingerprint_digest=_FINGERPRINT,
            layout=self._layout,
            context_ids=ref.context_ids,
            token_ids=ref.token_ids,
        )

    def write(self, ref: ChunkRef, kv: ChunkKV) -> None:
        self.publish([(ref, kv)])

    def forget_pages(self) -> None:
        """Takes the files out of the system's page cache."""
        for path in self._files():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)

    def read_gbs(self, input_keys: Sequence[str]) -> float:
        """Rate of a plain read of the files of these chunks, several at a time."""
        wanted = set(input_keys)
        files = [path for path in self._files() if path.name.partition(".")[0] in wanted]
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            seconds = self.seconds(lambda: list(threads.map(Path.read_bytes, files)))
        return sum(path.stat().st_size for path in files) / seconds / 1e9

    def write_gbs(self, num_bytes: int = 1 << 30) -> float:
        """Rate of a plain write of new files, several at a time, each synced."""
        data = os.urandom(1 << 20)
        folder = self._blocks.with_name("plain")
        folder.mkdir()

        def write(number: int) -> None:
            with (folder / str(number)).open("wb") as file:
                for _ in range(num_bytes // _WRITERS >> 20):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())

        with ThreadPoolExecutor(_WRITERS) as threads:
            seconds = self.seconds(lambda: list(threads.map(write, range(_WRITERS))))
        return num_bytes / seconds / 1e9

    def seconds(self, work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def _files(self) -> list[Path]:
        return [path for path in self._blocks.rglob("*") if path.is_file()]
