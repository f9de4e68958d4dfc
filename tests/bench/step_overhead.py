"""What the engine costs the host: CPU time around a model that computes nothing.

    python tests/bench/step_overhead.py [POLICY ...]

Prints microseconds of CPU time for each request and for each token that was computed. Requests map 60 chunks
of 64 tokens, 170 at a time; the last line is 64 answers of 64 tokens behind 8,192 mapped ones. CPU time, not
wall time: what else the machine does counts little.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from memkv.config import EngineConfig
from memkv.engine.engine import Engine
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import parse_policy
from memkv.engine.sampler import Sampling
from memkv.kv.chunk import ChunkKV
from memkv.model import attention
from memkv.model.support import ModelSpec

POLICIES = ("off", "exact", "head:1", "map", "select:0.15")
VOCAB_SIZE, LAYERS, MOST_ROWS = 49_152, 30, 4096


class NullModel:
    """Gives every row the same logits and every block the same mass."""

    def __init__(self) -> None:
        self._logits = torch.zeros((1, MOST_ROWS, VOCAB_SIZE))
        self._logits[..., 7] = 1.0

    def base_model(self, **inputs: Any) -> None:
        step = attention._current_step.get()
        assert step is not None
        for layer in step.block_mass_layers:
            step.block_mass[layer] = torch.ones((1, step.plan.num_entries))

    def __call__(self, *, logits_to_keep: torch.Tensor, **inputs: Any) -> Any:
        self.base_model()
        return SimpleNamespace(logits=self._logits[:, : len(logits_to_keep)])


class NoSource:
    def read(self, ref: ChunkRef) -> ChunkKV | None:
        return None

    def write(self, ref: ChunkRef, kv: ChunkKV) -> None:
        pass


@dataclass(frozen=True)
class Load:
    policy: str
    requests: int = 170
    chunks: int = 60
    chunk_tokens: int = 64
    answer_tokens: int = 1


def measure(load: Load, model: Any) -> str:
    random = Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(random.randrange(VOCAB_SIZE) for _ in range(count))

    config = EngineConfig(
        pool_bytes=6_000_000_000, max_batch_tokens=1 << 19, max_running=load.requests, threads=1
    )
    prefix = ChunkRef("prefix", (), ids(60))
    stored = [ChunkRef(f"{index}", prefix.token_ids, ids(load.chunk_tokens)) for index in range(600)]
    with Engine(model, "float32", config) as engine:
        engine.prefill(prefix, stored, NoSource(), block_size=16)
        for _ in range(2):  # the first time warms up
            requests = [
                GenerateRequest(
                    prefix,
                    tuple(random.sample(stored, load.chunks)),
                    ids(64),
                    policy=parse_policy("exact" if load.policy == "off" else load.policy),
                    reuse="off" if load.policy == "off" else "auto",
                    sampling=Sampling(max_tokens=load.answer_tokens, ignore_eos=True),
                )
                for _ in range(load.requests)
            ]
            started = time.process_time()
            generations = [engine.generate(request, NoSource()) for request in requests]
            usages = [generation.result().usage for generation in generations]
            seconds = time.process_time() - started
    tokens = sum(usage.prefilled_tokens + usage.completion_tokens - 1 for usage in usages)
    per_request, per_token = 1e6 * seconds / load.requests, 1e6 * seconds / tokens
    return f"{load.policy:12} {load.answer_tokens:3} {per_request:8.0f} us/request {per_token:8.2f} us/token"


def main(policies: Sequence[str]) -> None:
    spec = ModelSpec("Null", LAYERS, 1, 1, 8, VOCAB_SIZE, 1 << 20, (), (0,), "")
    model = SimpleNamespace(spec=spec, module=NullModel(), device="cpu")
    gc.freeze()
    for policy in policies:
        print(measure(Load(policy), model), flush=True)
    print(measure(Load("map", 64, 32, 256, answer_tokens=64), model))


if __name__ == "__main__":
    main(sys.argv[1:] or POLICIES)
