"""What an engine is measured against: transformers with its own attention and cache, memory, and the link."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from memkv.bench import continuous_batching
from memkv.bench.bandwidth import last_level_cache_bytes, machine_read_gbs
from memkv.engine.residency import ChunkRef
from memkv.kernels import cuda
from memkv.model.attention import ATTENTION_NAME
from memkv.model.compilation import uncompiled
from memkv.model.loader import LoadedModel

_GPU_BYTES = 4 << 30
_DECODE_STEPS = 16  # at most, that are measured


class Transformers:
    """The same module with torch's attention. The engine must be idle meanwhile.

    Attributes:
        num_weight_bytes: that a step reads.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model, self._module, self._spec = model, model.module, model.spec
        self._device = torch.device(model.device)
        module: Any = self._module
        embeddings, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
        weights = sum({each.data_ptr(): each.nbytes for each in module.parameters()}.values())
        is_tied = head.data_ptr() == embeddings.data_ptr()
        self.num_weight_bytes: int = weights - (0 if is_tied else embeddings.nbytes)

    @torch.inference_mode()
    def prefill_ms(self, ids: NDArray[np.int64]) -> float:
        """One pass over a prompt, until the next token is on the host."""
        row = torch.from_numpy(ids)[None].to(self._device)

        def work() -> None:
            self._module(row, use_cache=False, logits_to_keep=1).logits[0, -1].argmax().item()

        with self._own_attention():
            return 1e3 * self._seconds(work)

    def decode_ms(self, batch: int, context: int, steps: int) -> tuple[dict[str, float], dict[str, str]]:
        """One token of each of `batch` sequences behind `context` tokens, by each of its ways to decode.

        Returns:
            milliseconds, and why there are none where a way failed.
        """
        ways = {"transformers": self._generate_ms, "continuous_batching": self._continuous_batching_ms}
        found: dict[str, float] = {}
        failed: dict[str, str] = {}
        self._free_memory()
        for name, way in ways.items():
            try:
                found[name] = way(batch, context, min(steps, _DECODE_STEPS))
            except Exception as error:  # noqa: BLE001  # a peer's failure is a finding
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            self._free_memory()
        return found, failed

    @torch.inference_mode()
    def forward_seconds(self, chunks: Sequence[ChunkRef], batch: int) -> float:
        """Passes without the head over chunks of one length, `batch` at a time."""

        def work() -> None:
            for first in range(0, len(chunks), batch):
                ids = [ref.token_ids for ref in chunks[first : first + batch]]
                rows = torch.tensor(ids, device=self._device)
                self._module.base_model(input_ids=rows, use_cache=False)

        with self._own_attention():
            return self._seconds(work)

    @torch.inference_mode()
    def _generate_ms(self, batch: int, context: int, steps: int) -> float:
        """Behind random keys and values."""
        spec = self._spec
        shape = (batch, spec.num_kv_heads, context, spec.head_dim)
        cache = DynamicCache()
        for layer in range(spec.num_layers):
            keys = torch.randn(shape, dtype=self._module.dtype, device=self._device)
            cache.update(keys, torch.randn_like(keys), layer)
        token = torch.zeros((batch, 1), dtype=torch.int64, device=self._device)
        step = partial(self._step, token, cache)
        with self._own_attention():
            return 1e3 * statistics.median(self._seconds(step) for _ in range(steps))

    def _continuous_batching_ms(self, batch: int, context: int, steps: int) -> float:
        with self._own_attention(continuous_batching.paged_attention()):
            return continuous_batching.token_ms(self._module, batch, context, steps, self._spec.vocab_size)

    def _free_memory(self) -> None:
        """Of what was measured before."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _step(self, token: Tensor, cache: DynamicCache) -> None:
        logits = self._module(token, past_key_values=cache, use_cache=True).logits
        logits[:, -1].argmax(dim=-1).tolist()

    def _seconds(self, work: Callable[[], object]) -> float:
        _wait_for(self._device)
        started = time.perf_counter()
        work()
        _wait_for(self._device)
        return time.perf_counter() - started

    @contextmanager
    def _own_attention(self, name: str = "sdpa") -> Iterator[None]:
        self._module.set_attn_implementation(name)
        try:
            with uncompiled(self._model):
                yield
        finally:
            self._module.set_attn_implementation(ATTENTION_NAME)


def read_gbs(device: torch.device) -> float:
    """Rate at which a device reads its memory."""
    if device.type == "cpu":
        return machine_read_gbs(4 * last_level_cache_bytes(), 3)
    data = torch.ones(_GPU_BYTES, dtype=torch.uint8, device=device)
    read = partial(cuda.read_memory, data) if cuda.built() else data.view(torch.int64).sum
    return _GPU_BYTES / _best_seconds(read, device) / 1e9


def upload_gbs(device: torch.device) -> float:
    """Rate of one large copy out of pinned host memory; out of any, on a CPU."""
    num_bytes = 1 << 30 if device.type == "cuda" else 1 << 28
    source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return num_bytes / _best_seconds(lambda: target.copy_(source, non_blocking=True), device) / 1e9


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(6):
        _wait_for(device)
        started = time.perf_counter()
        work()
        _wait_for(device)
        best = min(best, time.perf_counter() - started)
    return best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
