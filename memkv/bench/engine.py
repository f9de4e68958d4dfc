"""`memkv bench engine`: first tokens, decode and ingest of an engine, beside what each is measured against.

    first token   by context, policy and tier, from `generate` to the token on the host, beside a full prefill
                  by the same engine and by transformers; prompts are a prefix, chunks of random tokens, and a
                  question. Tier: where the chunks are before: on the device, in host memory, on disk (and in
                  nobody's page cache). What overlaps on the way from there is kept as a timeline.
    decode        one token of each sequence of a batch, each with chunks of its own, beside the time to read
                  weights and KV once, and beside transformers, one batch by itself and by its continuous
                  batching
    ingest        chunks computed, written and synced, beside transformers' pass over the same ids

Ways of one measurement take turns; figures are medians.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import torch

from memkv.bench.engine_peers import Transformers, read_gbs, upload_gbs
from memkv.bench.engine_store import BenchStore
from memkv.bench.timeline import Timeline, timeline_of, verify_share
from memkv.config import EngineConfig
from memkv.engine.engine import Engine
from memkv.engine.environment import cpu_name, versions
from memkv.engine.generation import GenerationResult
from memkv.engine.prefill import PrefillJob
from memkv.engine.request import GenerateRequest, Reuse
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import parse_policy
from memkv.engine.sampler import Sampling
from memkv.kv.layout import KVLayout
from memkv.model.loader import LoadedModel

Tell = Callable[[str], None]
TIERS = ("device", "host", "disk")
_BATCHES_UNDER_WAY = 3


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured; tokens, unless it says otherwise."""

    contexts: tuple[int, ...] = (4096, 16_384, 32_768, 131_072)
    chunk: int = 512
    prefix: int = 64
    question: int = 64
    policies: tuple[str, ...] = ("map", "head:2", "select:0.1")
    far_policies: tuple[str, ...] = ("map", "select:0.1")  # from the host and from disk too,
    far_contexts: tuple[int, ...] = (32_768,)  # where the context is one of these
    rounds: int = 5  # behind one that warms up; one in all from `long_context` on
    long_context: int = 65_536
    batches: tuple[int, ...] = (1, 8, 64)
    batch_context: int = 8192
    batch_tokens: int = 64  # of each answer
    ingest_chunks: int = 128
    ingest_batch: int = 16  # chunks
    block_size: int = 16


CPU_SIZES = Sizes(
    contexts=(1024,),
    far_contexts=(1024,),
    chunk=128,
    rounds=3,
    batches=(1, 4),
    batch_context=512,
    batch_tokens=16,
    ingest_chunks=16,
)


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    context: int
    policy: str
    tier: str
    ms: float
    queue_ms: float  # of it: until it had its blocks,
    load_ms: float  # until the chunks were in place, or their copies to the device submitted,
    look_ms: float  # until its policy had seen where the question looks,
    prefill_ms: float  # and for what is computed afresh
    computed_tokens: int
    full_prefill_ms: float
    transformers_ms: float


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    batch: int
    context: int
    ms: float
    floor_ms: float
    peers_ms: dict[str, float]
    peers_failed: dict[str, str]  # why there is no time of a peer


class EngineBench(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; times in milliseconds, rates in tokens per second and in decimal gigabytes."""

    device: str
    model: str
    dtype: str
    kv_dtype: str
    versions: dict[str, str]
    sizes: Sizes
    ttft: list[FirstToken]
    timeline: list[Timeline]
    decode: list[Decode]
    read_gbs: float  # of the device's memory
    host_load_gbs: float  # chunks from host memory to the device
    host_link_gbs: float  # one large copy there
    disk_load_gbs: float  # chunks from disk, verified, to the device
    disk_read_gbs: float  # the same files by a plain parallel read
    disk_verify_share: float  # of the seconds of those loads, those that verified what was read
    disk_write_gbs: float  # as many bytes as an ingest writes, synced, by a plain parallel write
    ingest_tokens_per_s: float
    forward_tokens_per_s: float


def run_engine_bench(
    model: LoadedModel, kv_dtype: str, sizes: Sizes, directory: str | None, tell: Tell = lambda words: None
) -> EngineBench:
    """Measures an engine with one model.

    Args:
        directory: where the files of the chunks are kept meanwhile; the system's temporary one by default.
    """
    with tempfile.TemporaryDirectory(prefix="memkv-bench-", dir=directory) as folder:
        return _Bench(model, kv_dtype, sizes, Path(folder), tell).run()


class _Bench:
    def __init__(self, model: LoadedModel, kv_dtype: str, sizes: Sizes, folder: Path, tell: Tell) -> None:
        self._model, self._kv_dtype, self._sizes = model, kv_dtype, sizes
        self._folder, self._tell = folder, tell
        self._random = Random(0)
        self._device = torch.device(model.device)
        self._peers = Transformers(model)
        self._prefix = ChunkRef("0" * 64, (), self._ids(sizes.prefix))
        self._rates: dict[str, list[float]] = {"host": [], "disk": [], "plain": [], "verify share": []}
        self._timelines: list[Timeline] = []

    def run(self) -> EngineBench:
        with BenchStore(self._folder) as store:
            self._store = store
            self._tell("reading memory")
            read = read_gbs(self._device)
            ttft = [row for context in self._sizes.contexts for row in self._first_tokens(context)]
            decode = [self._decode(batch, read) for batch in self._sizes.batches]
            ingest, forward = self._ingest()
            write = store.write_gbs()
        on_gpu = self._device.type == "cuda"
        return EngineBench(
            device=torch.cuda.get_device_name(self._device) if on_gpu else cpu_name(),
            model=self._model.name,
            dtype=self._model.dtype,
            kv_dtype=self._kv_dtype,
            versions=versions(),
            sizes=self._sizes,
            ttft=ttft,
            timeline=self._timelines,
            decode=decode,
            read_gbs=read,
            host_load_gbs=_median(self._rates["host"]),
            host_link_gbs=upload_gbs(self._device),
            disk_load_gbs=_median(self._rates["disk"]),
            disk_read_gbs=_median(self._rates["plain"]),
            disk_verify_share=_median(self._rates["verify share"]),
            disk_write_gbs=write,
            ingest_tokens_per_s=ingest,
            forward_tokens_per_s=forward,
        )

    def _first_tokens(self, context: int) -> list[FirstToken]:
        sizes = self._sizes
        chunks = self._chunks(context)
        ways = [("off", "device"), *((policy, "device") for policy in sizes.policies)]
        is_far = context in sizes.far_contexts
        rounds = sizes.rounds if context < sizes.long_context else 1
        ways += [(policy, tier) for tier in TIERS[1:] for policy in sizes.far_policies if is_far]
        found: dict[tuple[str, str], list[GenerationResult]] = {way: [] for way in ways}
        peer: list[float] = []
        host_tokens = 3 * context // 2 if is_far else 0
        gc.collect()  # the pool of the engine before
        with self._engine(pool_tokens=5 * context // 2, host_tokens=host_tokens) as engine:
            self._tell(f"{context} tokens: computing the chunks")
            self._make(engine, chunks, keep=is_far)
            for number in range(rounds + 1):
                for policy, tier in ways:
                    if number == 0 and policy == "off" and context >= sizes.long_context:
                        continue
                    self._tell(f"{context} tokens, round {number} of {rounds}: {policy}, {tier}")
                    self._bring(engine, chunks, tier)
                    result = engine.generate(self._request(chunks, policy), self._store).result()
                    if number:  # the first one warms up
                        found[policy, tier].append(result)
                        self._note_rates(engine, chunks, tier, result)
                if number:
                    peer.append(self._peers.prefill_ms(self._request(chunks, "off").prompt_ids))
            for policy, tier in ways:
                if tier != "device" and policy.startswith("select"):
                    self._tell(f"{context} tokens, timeline: {policy}, {tier}")
                    self._timelines.append(self._timeline(engine, chunks, policy, tier))
        full = _median([result.timings.ttft_ms for result in found["off", "device"]])
        return [
            FirstToken(
                context=context,
                policy=policy,
                tier=tier,
                ms=_median([result.timings.ttft_ms for result in results]),
                **{
                    stage: _median([getattr(result.timings, stage) for result in results])
                    for stage in ("queue_ms", "load_ms", "look_ms", "prefill_ms")
                },
                computed_tokens=results[0].usage.prefilled_tokens,
                full_prefill_ms=full,
                transformers_ms=_median(peer),
            )
            for (policy, tier), results in found.items()
        ]

    def _timeline(self, engine: Engine, chunks: list[ChunkRef], policy: str, tier: str) -> Timeline:
        self._bring(engine, chunks, tier)
        request = self._request(chunks, policy)
        with engine.timeline() as events:
            asked = time.monotonic()
            result = engine.generate(request, self._store).result()
        context = sum(ref.num_tokens for ref in chunks)
        return timeline_of(events, self._store.loads, asked, result.timings, (context, policy, tier))

    def _bring(self, engine: Engine, chunks: list[ChunkRef], tier: str) -> None:
        """Puts the chunks where they are to be."""
        keys = [ref.input_key for ref in (self._prefix, *chunks)]
        if tier == "disk":
            engine.drop(keys)
            self._store.forget_pages()
            self._store.loads.clear()
            return
        engine.generate(self._request(chunks, "map"), self._store).result()
        if tier == "host":
            engine.evict(keys)
        self._loaded = engine.stats().lanes[0].counters

    def _note_rates(
        self, engine: Engine, chunks: list[ChunkRef], tier: str, result: GenerationResult
    ) -> None:
        if tier == "host":
            after = engine.stats().lanes[0].counters
            seconds = after.host_load_seconds - self._loaded.host_load_seconds
            if seconds:
                loaded = after.host_loaded_bytes - self._loaded.host_loaded_bytes
                self._rates["host"].append(loaded / seconds / 1e9)
        elif tier == "disk":
            num_bytes = sum(engine.layout(self._sizes.block_size).bytes_for(ref.num_tokens) for ref in chunks)
            self._rates["disk"].append(num_bytes / result.timings.load_ms / 1e6)
            self._rates["verify share"].append(verify_share(self._store.loads))
            self._store.forget_pages()
            self._rates["plain"].append(self._store.read_gbs([ref.input_key for ref in chunks]))

    def _decode(self, batch: int, read: float) -> Decode:
        sizes = self._sizes
        ms, per_token = self._decode_ms(batch)
        gc.collect()  # the engine's pool may be most of the device's memory
        tokens = sizes.batch_context + sizes.prefix + sizes.question + sizes.batch_tokens // 2
        num_bytes = self._peers.num_weight_bytes + batch * tokens * per_token
        self._tell(f"decode, batch {batch}: transformers")
        peers, failed = self._peers.decode_ms(batch, tokens, sizes.batch_tokens)
        return Decode(
            batch=batch,
            context=sizes.batch_context,
            ms=ms,
            floor_ms=num_bytes / read / 1e6,
            peers_ms=peers,
            peers_failed=failed,
        )

    def _decode_ms(self, batch: int) -> tuple[float, int]:
        """Of a token of each, and bytes of a token's KV."""
        sizes = self._sizes
        context = sizes.batch_context
        groups = [self._chunks(context) for _ in range(batch)]
        own = sizes.question + sizes.batch_tokens + 2 * sizes.block_size
        with self._engine(pool_tokens=batch * (context + own) + context) as engine:
            self._tell(f"decode, batch {batch}: computing the chunks")
            for chunks in groups:
                self._make(engine, chunks, keep=False)
            self._tell(f"decode, batch {batch}")
            for _ in range(2):  # the first one warms up
                requests = [self._request(chunks, "map", max_tokens=sizes.batch_tokens) for chunks in groups]
                generations = [engine.generate(request, self._store) for request in requests]
                timings = [generation.result().timings for generation in generations][-1]
            ms = (timings.total_ms - timings.ttft_ms) / (sizes.batch_tokens - 1)
            return ms, engine.layout(sizes.block_size).bytes_per_token

    def _ingest(self) -> tuple[float, float]:
        """(ingest, transformers), in turns on the same ids."""
        sizes = self._sizes
        rates: tuple[list[float], list[float]] = ([], [])
        with self._engine(pool_tokens=4 * sizes.ingest_batch * sizes.chunk) as engine:
            for number in range(min(sizes.rounds, 3) + 1):
                self._tell(f"ingest and the bare model, round {number}")
                chunks = self._chunks(sizes.ingest_chunks * sizes.chunk)
                seconds = self._store.seconds(lambda chunks=chunks: self._make(engine, chunks))  # type: ignore[misc]
                bare = self._peers.forward_seconds(chunks, sizes.ingest_batch)
                if number:
                    tokens = sum(ref.num_tokens for ref in chunks)
                    rates[0].append(tokens / seconds)
                    rates[1].append(tokens / bare)
        return _median(rates[0]), _median(rates[1])

    def _make(self, engine: Engine, chunks: list[ChunkRef], *, keep: bool = True) -> None:
        """Computes chunks, batch by batch as an ingest does, and writes them down meanwhile."""
        size = self._sizes.ingest_batch
        under_way: deque[tuple[list[ChunkRef], PrefillJob]] = deque()
        for first in range(0, len(chunks), size):
            batch = chunks[first : first + size]
            job = engine.submit_prefill(self._prefix, batch, self._store, block_size=self._sizes.block_size)
            under_way.append((batch, job))
            if len(under_way) == _BATCHES_UNDER_WAY:
                self._finish(engine, *under_way.popleft(), keep=keep)
        for batch, job in under_way:
            self._finish(engine, batch, job, keep=keep)

    def _finish(self, engine: Engine, batch: list[ChunkRef], job: PrefillJob, *, keep: bool) -> None:
        made = engine.collect(job)
        if keep:
            self._store.publish(list(zip(batch, made, strict=True)))

    def _engine(self, pool_tokens: int, host_tokens: int = 0) -> Engine:
        """With room for so many tokens, and some."""
        config = EngineConfig(
            max_running=max(self._sizes.batches), continuation_share=0.0, queue_seconds=3600.0
        )
        config = replace(config, max_batch_tokens=8192 if self._device.type == "cuda" else 4096)
        spec, size = self._model.spec, self._sizes.block_size
        layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, size, self._kv_dtype)
        spare = 4 * self._sizes.chunk
        pool, host = (
            layout.bytes_for(tokens + spare) if tokens else 0 for tokens in (pool_tokens, host_tokens)
        )
        return Engine(self._model, self._kv_dtype, replace(config, pool_bytes=pool, host_bytes=host))

    def _request(self, chunks: list[ChunkRef], way: str, max_tokens: int = 1) -> GenerateRequest:
        reuse: Reuse = "off" if way == "off" else "strict"
        return GenerateRequest(
            prefix=self._prefix,
            chunks=tuple(chunks),
            tail_ids=self._ids(self._sizes.question),
            block_size=self._sizes.block_size,
            policy=parse_policy("exact" if way == "off" else way),
            reuse=reuse,
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        )

    def _chunks(self, num_tokens: int) -> list[ChunkRef]:
        """Chunks that together have so many tokens."""
        return [
            ChunkRef(f"{self._random.getrandbits(256):064x}", self._prefix.token_ids, self._ids(size))
            for start in range(0, num_tokens, self._sizes.chunk)
            if (size := min(self._sizes.chunk, num_tokens - start))
        ]

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._model.spec.vocab_size) for _ in range(count))


def _median(values: list[float]) -> float:
    """0 where nothing was measured."""
    return statistics.median(values) if values else 0.0
