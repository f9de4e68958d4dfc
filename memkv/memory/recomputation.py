"""Chunks prefilled again and compared with what is stored: the check that no checksum makes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from memkv.errors import FingerprintMismatch, NotFoundError
from memkv.kv.chunk import ChunkKV
from memkv.memory.collections import Collections
from memkv.memory.parts import Parts
from memkv.store.block_file import file_name
from memkv.store.durable_files import Damage
from memkv.store.rows import KVFileRow
from memkv.store.verification import Recomputed, StoreProblem

# Of the stored values' norm. Another batch rounds other sums: at most a unit in the last place of bfloat16 in
# few elements. KV of other tokens, another position or other weights is off by more than its own norm.
_TOLERANCE = 0.02


def recompute(
    parts: Parts,
    collections: Collections,
    count: int,
    repair: bool,
    deadline: float,
    on_progress: Callable[[int, int], None],
) -> Recomputed:
    """Prefills `count` chunks, chosen by chance, and names those whose stored KV is another.

    Those of collections that another model made, and those that are damaged or gone, are passed over.
    With `repair` a file that is another is set aside. After `deadline`, of `time.monotonic`, none is begun.
    """
    rows = parts.store.catalog.files_of_all_tenants()
    random.shuffle(rows)
    found: list[StoreProblem] = []
    done = 0
    for row in rows:
        if done == count or time.monotonic() >= deadline:
            break
        difference = _difference(parts, collections, row)
        if difference is None:
            continue
        done += 1
        on_progress(done, min(count, len(rows)))
        if difference > _TOLERANCE:
            damage = Damage("recomputed", f"the model makes other KV of these tokens: {difference:.2g} off")
            repaired = repair and parts.store.chunks.set_right(row, damage)
            name = file_name(row.input_key, row.file_digest)
            found.append(StoreProblem(damage.kind, name, damage.detail, repaired))
    return Recomputed(done, found)


def _difference(parts: Parts, collections: Collections, row: KVFileRow) -> float | None:
    """How far stored KV is from KV made anew, in norms; None where it cannot be told."""
    try:
        chunk = parts.store.catalog.chunk_of_key(row.tenant, row.input_key)
        collection = collections.open(parts.store.catalog.collection_by_id(row.tenant, chunk.collection_id))
    except (NotFoundError, FingerprintMismatch):
        return None
    ref = collection.ref(row.input_key, chunk.token_ids)
    stored = collection.kv.read(ref)
    if stored is None:
        return None
    parts.engine.drop([row.input_key])  # what is resident would be handed back
    [made] = parts.engine.prefill(
        collection.prefix, [ref], collection.kv, block_size=collection.row.block_size
    )
    before, now = _values(stored), _values(made)
    return float((now - before).norm() / before.norm().clamp_min(1e-12))


def _values(kv: ChunkKV) -> torch.Tensor:
    """All keys and values, float32 [n]."""
    return torch.frombuffer(bytearray(kv.data), dtype=getattr(torch, kv.layout.dtype)).float()
