"""Shared by the engine's tests: a source in memory, random prompts, a model that answers by all it saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor

from memkv.config import EngineConfig
from memkv.engine.batch import Batch, BatchLook, VisibleTable
from memkv.engine.kv_cache import KVCache
from memkv.engine.model_runner import StepResult
from memkv.engine.residency import ChunkRef
from memkv.engine.steps import _Sampled
from memkv.engine.stopwatch import Stopwatch
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout
from memkv.model.support import ModelSpec

FAKE_VOCAB = 1000
FAKE_EOS = 999


def config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"pool_bytes": 20_000_000, "threads": 1, "queue_seconds": 20.0}
    return EngineConfig(**{**values, **changes})


@contextmanager
def full_float32() -> Iterator[None]:
    """A GPU multiplies float32 as such, not as TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Fails where the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.002)


class MemorySource:
    """A KVSource over a dict. `on_read` may wait, raise or return what is to be read instead."""

    def __init__(self, on_read: Callable[[ChunkRef], ChunkKV | None] | None = None) -> None:
        self.kept: dict[str, ChunkKV] = {}
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.on_read = on_read
        self._lock = threading.Lock()

    def read(self, ref: ChunkRef) -> ChunkKV | None:
        with self._lock:
            self.reads.append(ref.input_key)
        if self.on_read is not None:
            return self.on_read(ref)
        return self.kept.get(ref.input_key)

    def write(self, ref: ChunkRef, kv: ChunkKV) -> None:
        with self._lock:
            self.writes.append(ref.input_key)
            self.kept[ref.input_key] = kv


class RandomPrompts:
    """Refs of random tokens, the same in every run."""

    def __init__(self, vocab_size: int, prefix_tokens: int = 13, seed: int = 0) -> None:
        self.random = Random(seed)
        self._vocab_size = vocab_size
        self.prefix = ChunkRef(f"prefix{seed or ''}", (), self.ids(prefix_tokens))

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(3, self._vocab_size - 1) for _ in range(count))

    def chunk(self, num_tokens: int, key: str | None = None) -> ChunkRef:
        ids = self.ids(num_tokens)
        return ChunkRef(key or f"{hash(ids):x}", self.prefix.token_ids, ids)


class Letters:
    """A decoder of one letter a token."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def finish(self) -> str:
        return ""


def fake_spec(max_context: int = 4096) -> ModelSpec:
    return ModelSpec(
        architecture="Fake",
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=FAKE_VOCAB,
        max_context=max_context,
        layers=(),
        eos_token_ids=(FAKE_EOS,),
        rope_description="",
    )


def fake_model(max_context: int = 4096) -> Any:
    return SimpleNamespace(spec=fake_spec(max_context), module=None, device="cpu")


FAKE_LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


def fake_next(ids: Sequence[int]) -> int:
    """The token that `FakeRunner` puts behind these: it depends on every one of them and on their order."""
    value = 17
    for token in ids:
        value = (value * 31 + token) % 1_000_003
    return value % (FAKE_EOS - 3) + 3  # never the end of text


def fake_answer(prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(fake_next(ids))
    return ids[len(prompt) :]


def run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps end as late as they may: when the next one has been submitted, or there is none."""
    monkeypatch.setattr(FakeRunner, "runs_ahead", True)
    monkeypatch.setattr(_Sampled, "is_here", False)


def end_late(monkeypatch: pytest.MonkeyPatch, random: Random) -> None:
    """What a device does ends when the host has looked a few times, or waits for it.

    A copy into blocks reads and writes when it begins or as late as that; a copy out of them reads at once,
    as one in the order of the steps does.
    """

    def begin(copy: Callable[..., Stopwatch]) -> Callable[..., Stopwatch]:
        def deferred(*args: Any) -> Stopwatch:
            if random.random() < 0.5:
                return copy(*args)
            watch = Stopwatch(torch.device("cpu"))
            watch.stop()
            waiting[watch] = partial(copy, *args)
            return watch

        return deferred

    def end(watch: Stopwatch) -> None:
        ended.add(watch)
        if watch in waiting:
            waiting.pop(watch)()

    def is_over(watch: Stopwatch) -> bool:
        if watch not in ended and random.random() < 0.1:
            end(watch)
        return watch in ended

    def seconds(watch: Stopwatch) -> float:
        end(watch)
        return measured(watch)

    waiting: dict[Stopwatch, Callable[[], Stopwatch]] = {}
    ended: WeakSet[Stopwatch] = WeakSet()
    measured = Stopwatch.seconds
    for name in ("import_chunk", "import_blocks"):
        monkeypatch.setattr(KVCache, name, begin(getattr(KVCache, name)))
    monkeypatch.setattr(Stopwatch, "is_over", property(is_over))
    monkeypatch.setattr(_Sampled, "is_here", property(lambda sampled: sampled.watch.is_over))
    monkeypatch.setattr(Stopwatch, "wait", end)
    monkeypatch.setattr(Stopwatch, "seconds", seconds)


class FakeRunner:
    """Stores each token's id and position as its key and value; answers with a hash of all that a row sees.

    A block that is foreign, stale, unwritten or at a wrong place changes the answer, or is found at once.
    `before` may wait or raise at the start of each step.
    """

    runs_ahead = False  # as a GPU, which samples the token that the next step begins with; see conftest.py

    def __init__(self, model: Any = None) -> None:
        self.device = torch.device("cpu")
        self.before: Callable[[Batch], None] | None = None
        self.batches: list[Batch] = []
        self.looking_rows: list[list[int]] = []  # positions of the rows of each look

    def run(self, batch: Batch, kv_cache: KVCache) -> StepResult:
        if self.before is not None:
            self.before(batch)
        if batch.fed:
            fed = np.concatenate([tokens.numpy() for tokens in batch.fed])
            batch.token_ids[:] = np.where(batch.sources < 0, batch.token_ids, fed[batch.sources])
        self.batches.append(batch)
        for table, of_owner in zip(batch.tables, batch.positions, strict=True):
            ends = table.segments[:, 1] + table.segments[:, 2]
            assert max(ends) == of_owner[-1] + 1, "what is not written yet is offered to the kernel"
        k_cache, v_cache = (view.numpy() for view in kv_cache.layer(0))
        size = kv_cache.layout.block_size
        positions = np.concatenate(batch.positions)
        block, offset = np.divmod(batch.slots, size)
        k_cache[block, 0, :, offset] = 0
        k_cache[block, 0, 0, offset, 0] = batch.token_ids
        v_cache[block, 0, :, offset] = positions[:, None]
        masses = [self._mass(batch, look) for look in batch.looks]
        if not batch.logit_rows:
            return StepResult(None, masses)
        logits = torch.zeros((len(batch.logit_rows), FAKE_VOCAB))
        owners = [index for index, of_owner in enumerate(batch.positions) for _ in of_owner]
        for row, place in enumerate(batch.logit_rows):
            table = batch.tables[owners[place]]
            logits[row, fake_next(self._seen(table, positions[place], k_cache, v_cache, size))] = 10.0
        return StepResult(logits, masses)

    def _mass(self, batch: Batch, look: BatchLook) -> Tensor:
        """Each looking row gives every block its number: block 7 gets 7 times the rows."""
        first = 0
        for table, positions in zip(batch.tables, batch.positions, strict=True):
            if first == look.entries.start:
                assert first + len(table.entries) == look.entries.stop
                self.looking_rows.append(positions.tolist())
                return torch.from_numpy(table.entries).float() * len(positions)
            first += len(table.entries)
        raise AssertionError("a look at entries that no table begins with")

    def _seen(self, table: VisibleTable, last: int, k_cache: Any, v_cache: Any, size: int) -> list[int]:
        """The tokens at positions 0 .. last, by what their slots hold."""
        seen: list[int] = []
        for first, num_tokens, position, stored in table.segments.tolist():
            assert position == len(seen), "a position is missing, or there twice"
            visible = np.arange(min(num_tokens, last + 1 - position))
            block, offset = table.entries[first + visible // size], visible % size
            assert (v_cache[block, 0, 0, offset] == stored + visible).all(), "a key of another position"
            seen.extend(k_cache[block, 0, 0, offset, 0].astype(int).tolist())
        assert len(seen) == last + 1
        return seen
