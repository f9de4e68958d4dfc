"""One run that compares: answers with and without reuse, kernel with memory, ingest with the bare model.

Everything is measured in one process, on one temporary store, turn by turn, so that what else the machine
does falls on all sides alike. Chunks really have `chunk_tokens` tokens, label included, and the question
`question_tokens`; the template behind the question comes on top and is computed in every way.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from memkv.bench.bandwidth import kernel_read_gbs, last_level_cache_bytes, machine_read_gbs
from memkv.bench.documents import text_of
from memkv.bench.model_pass import ModelPass
from memkv.config import Config
from memkv.engine.environment import cpu_name, threads, versions
from memkv.errors import InternalServerError
from memkv.kv.layout import KVLayout
from memkv.memory import Memory
from memkv.text.chunker import chunk_text
from memkv.wire import CollectionCreate, DocumentCreate, Generation, QueryRequest, QueryResponse, Reuse

Tell = Callable[[str], None]

WAYS: tuple[tuple[str, Reuse, str], ...] = (  # the name in the result, reuse, policy
    ("off", "off", "exact"),
    ("exact", "auto", "exact"),
    ("head", "auto", "head:1"),
    ("map", "auto", "map"),
)
_INGEST_ROUNDS = 3  # enough: one takes as long as ten answers
_RETRIEVED, _INGESTED = "retrieved", "ingested"  # collections


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        rounds: every way is measured so often, in turn; medians are reported.
        ingest_chunks: chunks in one timed ingest and in one timed pass of the bare model.
        read_bytes: KV that the kernel reads, and memory that the machine reads; at least four times the
            last-level cache.
    """

    chunks: int = 8
    chunk_tokens: int = 256
    question_tokens: int = 32
    block_size: int = 16
    rounds: int = 5
    ingest_chunks: int = 32
    decode_tokens: int = 64
    read_bytes: int = 512_000_000


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; times in milliseconds, rates in decimal gigabytes and in tokens per second."""

    ttft_ms: dict[str, float]  # by way; from the question's arrival to the first token, retrieval included
    prefilled_tokens: dict[str, int]
    cached_tokens: dict[str, int]
    prompt_tokens: int
    retrieve_ms: float
    speedup: dict[str, float]  # ttft of off, divided by the way's own
    kernel_read_gbs: float
    machine_read_gbs: float
    ingest_tokens_per_s: float  # text in, blocks on disk and rows committed
    model_tokens_per_s: float  # transformers' forward pass without the head, same ids, threads and batch
    decode_tokens_per_s: float
    shape: Shape
    model: str
    kv_dtype: str
    versions: dict[str, str]
    threads: dict[str, int]
    cpu: str


def run_comparison(
    config: Config, shape: Shape, tell: Tell = lambda words: None, *, keep_on_disk_of: str | None = None
) -> Comparison:
    """Measures everything.

    Args:
        config: model, embedder, threads and dtypes; the data directory is a temporary one.
        keep_on_disk_of: a directory in which the temporary one is made; the system's own place by default.

    Raises:
        MemKVError: whatever stops a Memory from working.
    """
    with tempfile.TemporaryDirectory(prefix="memkv-bench-", dir=keep_on_disk_of) as directory:
        config = replace(
            config,
            store=replace(config.store, data_dir=directory, database_url=""),
            kv=replace(config.kv, block_size=shape.block_size),
            engine=replace(config.engine, continuation_share=0.0),  # each round is a first one
            ingest=replace(config.ingest, chunk_tokens=shape.chunk_tokens, prefill="eager"),
        )
        with Memory.open(config, on_progress=tell) as memory:
            return _Run(memory, config, shape, tell).measure()


class _Run:
    def __init__(self, memory: Memory, config: Config, shape: Shape, tell: Tell) -> None:
        self._memory = memory
        self._config = config
        self._shape = shape
        self._tell = tell
        self._model = ModelPass.load(config, batch=config.ingest.batch_chunks)

    def measure(self) -> Comparison:
        shape = self._shape
        self._tell("ingesting the chunks to retrieve")
        self._ingest(_RETRIEVED, self._documents(shape.chunks, seed=1))
        torch.set_num_threads(
            self._memory.info().threads["torch"]
        )  # as the engine's thread, for the bare model too
        answers = self._answers()
        decode = self._decode_rate()
        ingest_rate, model_rate = self._ingest_and_model_rates()
        kernel, machine = self._read_rates()
        ttft = {way: statistics.median(r.timings.ttft_ms for r in rounds) for way, rounds in answers.items()}
        usage = {way: rounds[0].usage for way, rounds in answers.items()}
        retrieve = [r.timings.retrieve_ms for rounds in answers.values() for r in rounds]
        info = self._memory.info()
        return Comparison(
            ttft_ms=ttft,
            prefilled_tokens={way: one.prefilled_tokens for way, one in usage.items()},
            cached_tokens={way: one.cached_tokens for way, one in usage.items()},
            prompt_tokens=usage["off"].prompt_tokens,
            retrieve_ms=statistics.median(retrieve),
            speedup={way: ttft["off"] / value for way, value in ttft.items()},
            kernel_read_gbs=kernel,
            machine_read_gbs=machine,
            ingest_tokens_per_s=ingest_rate,
            model_tokens_per_s=model_rate,
            decode_tokens_per_s=decode,
            shape=shape,
            model=info.model.name,
            kv_dtype=info.model.kv_dtype,
            versions=versions(),
            threads=threads(),
            cpu=cpu_name(),
        )

    def _documents(self, count: int, seed: int) -> list[DocumentCreate]:
        """Documents of one chunk each, which has exactly `chunk_tokens` tokens."""
        documents = []
        for index in range(count):
            title = f"Document {seed}.{index}"
            counted = functools.partial(self._tokens, title=title)
            text = text_of(self._shape.chunk_tokens, counted, index)
            documents.append(DocumentCreate(text=text, title=title, external_id=title))
        return documents

    def _chunk_ids(self, text: str, title: str) -> list[list[int]]:
        chunks = chunk_text(text, title, self._model.tokenizer, self._shape.chunk_tokens)
        return [list(chunk.token_ids) for chunk in chunks]

    def _tokens(self, text: str, title: str) -> int:
        return sum(map(len, self._chunk_ids(text, title)))

    def _ingest(self, collection: str, documents: Sequence[DocumentCreate]) -> int:
        """Returns the tokens that were prefilled."""
        self._memory.create_collection(CollectionCreate(name=collection), exist_ok=True)
        queued = self._memory.ingest(collection, documents).job
        assert queued is not None, "bug: documents that were ingested before"
        job = self._memory.wait_job(queued.id, timeout=None)
        if job.status != "succeeded":
            raise InternalServerError(
                job.errors[0].detail if job.errors else f"the ingest ended as {job.status}",
                hint="run memkv doctor",
            )
        return job.counts.tokens_prefilled

    def _answers(self) -> dict[str, list[QueryResponse]]:
        """Every way's responses, the ways in turn; each was run once before, so that nothing is cold."""
        question = text_of(
            self._shape.question_tokens, lambda text: len(self._model.tokenizer.encode(text)), 99
        )
        found: dict[str, list[QueryResponse]] = {way: [] for way, _, _ in WAYS}
        for number in range(self._shape.rounds + 1):
            for way, reuse, policy in WAYS:
                self._tell(f"first token, round {number} of {self._shape.rounds}: {way}")
                response = self._query(question, reuse, policy, max_tokens=1)
                self._check(response)
                if number:
                    found[way].append(response)
        return found

    def _query(self, question: str, reuse: Reuse, policy: str, *, max_tokens: int) -> QueryResponse:
        return self._memory.query(
            QueryRequest(
                query=question,
                collection=_RETRIEVED,
                top_k=self._shape.chunks,
                min_score=-1.0,
                reuse=reuse,
                policy=policy,
                generation=Generation(max_tokens=max_tokens),
            )
        )

    def _check(self, response: QueryResponse) -> None:
        """What is reported must be what was measured."""
        tokens = [chunk.tokens for chunk in response.chunks]
        if tokens != [self._shape.chunk_tokens] * self._shape.chunks:
            raise InternalServerError(
                f"chunks of {tokens} tokens were retrieved", hint="this is a bug in memkv"
            )
        if response.reuse.fallback_reason or response.reuse.healed_chunks:
            raise InternalServerError(
                f"the answer fell back: {response.reuse.fallback_reason or 'chunks were computed again'}",
                hint="run memkv doctor",
            )

    def _decode_rate(self) -> float:
        """Tokens per second after the first, one sequence; the median of the rounds."""
        rates = []
        for _ in range(self._shape.rounds):
            self._tell("decoding")
            response = self._query("Tell a long story.", "auto", "map", max_tokens=self._shape.decode_tokens)
            seconds = (response.timings.total_ms - response.timings.ttft_ms) / 1000
            if response.usage.completion_tokens > 1:
                rates.append((response.usage.completion_tokens - 1) / seconds)
        return statistics.median(rates) if rates else 0.0

    def _ingest_and_model_rates(self) -> tuple[float, float]:
        """(ingest, bare model): medians over rounds of new documents, the two in turn on the same ids."""
        ingest: list[float] = []
        model: list[float] = []
        rounds = min(self._shape.rounds, _INGEST_ROUNDS)
        for number in range(rounds + 1):
            self._tell(f"ingest and the bare model, round {number} of {rounds}")
            documents = self._documents(self._shape.ingest_chunks, seed=10 + number)
            ids = [ids for document in documents for ids in self._chunk_ids(document.text, document.title)]
            start = time.perf_counter()
            tokens = self._ingest(_INGESTED, documents)
            middle = time.perf_counter()
            self._model.run(ids)
            end = time.perf_counter()
            if tokens != sum(map(len, ids)):
                raise InternalServerError(f"{tokens} tokens were prefilled, not {sum(map(len, ids))}")
            if number:
                ingest.append(tokens / (middle - start))
                model.append(tokens / (end - middle))
        return statistics.median(ingest), statistics.median(model)

    def _read_rates(self) -> tuple[float, float]:
        """(kernel, machine) in GB/s."""
        self._tell("reading memory")
        num_bytes = max(self._shape.read_bytes, 4 * last_level_cache_bytes())
        spec = self._model.spec
        layout = KVLayout(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, self._shape.block_size, self._config.kv.dtype
        )
        machine = machine_read_gbs(num_bytes, self._shape.rounds)
        kernel = kernel_read_gbs(spec, layout, num_bytes, self._shape.rounds)
        return kernel, max(machine, machine_read_gbs(num_bytes, self._shape.rounds))
