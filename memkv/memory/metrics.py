"""Every number of the store, and the engine's, as metrics: plain values, whoever shows them.

A gauge is how things are; a counter what happened since the process opened the store, and only grows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from memkv.config import StoreConfig
from memkv.store import Store
from memkv.store.archives import Archives
from memkv.store.verification import Scrubbed

if TYPE_CHECKING:
    from memkv.engine.stats import EngineStats

_DAMAGED = "damaged_"
_BLOCK_FILE_COUNTERS = {
    "hits": "loads that found sound KV",
    "misses": "loads that found none, or a damaged file",
    "loaded_bytes": "bytes of KV loaded and verified",
    "published": "block files published",
    "published_bytes": "bytes of block files published",
    "reclaimed": "block files let go of",
    "reclaimed_bytes": "bytes of block files let go of",
    "quarantined": "files set aside",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with its samples.

    Attributes:
        name: as it is shown, but for a counter's `_total`.
        label: the name of the one label that tells samples apart; empty where there is one sample.
        samples: label value -> value.
    """

    name: str
    help: str
    kind: Literal["gauge", "counter"]
    samples: Mapping[str, float]
    label: str = ""


def store_metrics(
    store: Store, archives: Archives, config: StoreConfig, scrubbed: Scrubbed
) -> Iterator[Metric]:
    """Raises DatabaseUnavailable, DatabaseDamaged."""
    stats: dict[str, Any] = store.stats()
    yield _gauge("collections", "collections", stats["collections"])
    documents = {status: stats[f"documents_{status}"] for status in ("pending", "ready", "failed")}
    yield Metric("memkv_documents", "documents by state", "gauge", documents, "status")
    yield _gauge("chunks", "chunks", stats["chunks"])
    yield _gauge("tokens", "tokens of all chunks", stats["tokens"])
    yield _gauge("generation", "the store's generation: grows with every write", stats["generation"])
    yield _gauge("kv_files", "block files", stats["kv_files"])
    yield _gauge("kv_bytes", "bytes of block files", stats["kv_bytes"])
    by_collection = store.catalog.kv_bytes_by_collection()
    help_text = "bytes of block files made for a collection"
    yield Metric("memkv_collection_kv_bytes", help_text, "gauge", by_collection, "collection")
    caps = {"store": config.max_kv_bytes, "tenant": config.max_tenant_kv_bytes}
    yield Metric("memkv_kv_cap_bytes", "caps; 0: none", "gauge", caps, "scope")
    disk = os.statvfs(store.data_dir)
    yield _gauge("disk_free_bytes", "free on the data directory's disk", disk.f_bavail * disk.f_frsize)
    yield _gauge("database_bytes", "bytes of the database", store.database.size())
    snapshots = store.snapshots.list()
    yield _gauge("snapshots", "snapshots", len(snapshots))
    copied = sum(snapshot.database_bytes for snapshot in snapshots)
    yield _gauge("snapshot_bytes", "bytes of the databases that snapshots keep", copied)
    kept = archives.list()
    yield _gauge("archives", "archives in the data directory", len(kept))
    yield _gauge("archive_bytes", "bytes of archives in the data directory", sum(file.bytes for file in kept))
    yield Metric("memkv_jobs", "jobs by state", "gauge", store.jobs.count_by_status(), "status")
    yield from _block_files(stats["chunk_store"])
    yield from _indexes(stats["indexes"])
    recovery = {name: value for name, value in stats["recovery"].items() if isinstance(value, int)}
    yield Metric("memkv_recovery", "what the opening found and put right", "gauge", recovery, "what")
    for name, value in asdict(scrubbed).items():
        yield _counter(f"scrubbed_{name}", f"{name} that the scrubber read or found", value)


def stale_metric(collections: int) -> Metric:
    """Collections whose KV the model at hand cannot use."""
    return _gauge("stale_collections", "collections made with another model or other settings", collections)


def engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Of all lanes together."""
    lanes = stats.lanes
    blocks = {
        state: sum(getattr(lane.blocks, state) for lane in lanes)
        for state in ("free", "cached", "pinned", "private")
    }
    yield Metric("memkv_pool_blocks", "blocks of the pool by state", "gauge", blocks, "state")
    hosts = [lane.host_blocks for lane in lanes]
    held, cached = sum(host.held for host in hosts), sum(host.cached for host in hosts)
    free = sum(host.total for host in hosts) - held - cached
    host_blocks = {"free": free, "cached": cached, "held": held}
    yield Metric("memkv_host_pool_blocks", "blocks of the host pool by state", "gauge", host_blocks, "state")
    for name in ("waiting", "loading", "running", "jobs", "kept_blocks"):
        yield _gauge(f"engine_{name}", f"{name} of the engine", sum(getattr(lane, name) for lane in lanes))
    healed = sum(lane.healed_chunks for lane in lanes)
    yield _counter("healed_chunks", "chunks prefilled because a question found no valid KV", healed)
    for name in (field.name for field in fields(lanes[0].counters)) if lanes else ():
        total = sum(getattr(lane.counters, name) for lane in lanes)
        yield _counter(f"engine_{name}", f"{name} of the engine", total)


def _block_files(counters: Mapping[str, int]) -> Iterator[Metric]:
    for name, help_text in _BLOCK_FILE_COUNTERS.items():
        yield _counter(f"kv_{name}", help_text, counters.get(name, 0))
    damaged = {
        name.removeprefix(_DAMAGED): count for name, count in counters.items() if name.startswith(_DAMAGED)
    }
    yield Metric("memkv_kv_damaged", "loads that found a damaged file", "counter", damaged, "kind")
    yield _gauge("quarantine_files", "files set aside", counters["quarantine_files"])
    yield _gauge("quarantine_bytes", "bytes of files set aside", counters["quarantine_bytes"])


def _indexes(stats: Mapping[str, int]) -> Iterator[Metric]:
    yield _gauge("indexes_open", "vector indexes in memory", stats["open"])
    yield _gauge("index_vectors", "vectors in memory", stats["vectors"])
    yield _counter("indexes_loaded", "vector indexes read from their file", stats["loaded"])
    yield _counter("indexes_rebuilt", "vector indexes made again from the database", stats["rebuilt"])


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return Metric(f"memkv_{name}", help_text, "gauge", {"": value})


def _counter(name: str, help_text: str, value: float) -> Metric:
    return Metric(f"memkv_{name}", help_text, "counter", {"": value})
