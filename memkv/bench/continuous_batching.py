"""Decode by transformers' continuous batching, through its public API.

Its prompts differ in their last token only, and its cache shares whole blocks that are equal: they are
computed once. Who shares blocks may find them in the GPU's cache, which is to its advantage.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils.import_utils import is_flash_attn_2_available

_PAGE_TOKENS = 256  # of a block of its cache, by default
_STEP_TOKENS = 2048  # at most
_MOST_SECONDS = 120.0  # for a prompt, and for all answers


def paged_attention() -> str:
    """The fastest implementation of its paged attention that is installed."""
    return "paged|flash_attention_2" if is_flash_attn_2_available() else "paged|sdpa"


def token_ms(module: Any, batch: int, context: int, steps: int, vocab_size: int) -> float:
    """A token of each of `batch` answers, each behind `context` tokens; the median of so many steps.

    Args:
        module: a model with `paged_attention()`.
        context: rounded down to whole blocks of its cache.

    Raises whatever transformers does, and `TimeoutError`.
    """
    draw = Random(0)
    num_shared = context - context % _PAGE_TOKENS or context
    shared = [draw.randrange(vocab_size) for _ in range(num_shared)]
    own = batch * (1 + num_shared % _PAGE_TOKENS)  # tokens of prompts that are not computed once for all
    max_tokens = steps + 2 + own // _STEP_TOKENS  # who begins first goes on until the last one is through
    num_blocks = batch * (2 + (context + max_tokens) // _PAGE_TOKENS) + 1
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
    manager = module.init_continuous_batching(
        generation_config=greedy,
        continuous_batching_config=ContinuousBatchingConfig(
            max_batch_tokens=_STEP_TOKENS, num_blocks=num_blocks, safety_margin=0.0
        ),
    )
    try:
        manager.warmup()
        manager.start()
        manager.add_request([*shared, 0], max_new_tokens=1)
        _results(manager, 1)
        prompts = [[*shared, index % vocab_size] for index in range(batch)]
        manager.add_requests(prompts, max_new_tokens=max_tokens, record_timestamps=True)
        times = [result.timestamps for result in _results(manager, batch)]
    finally:
        manager.stop(hard_stop=True)
        manager.destroy()
    return 1e3 * _median_step(times)


def _results(manager: Any, count: int) -> list[Any]:
    """Of so many requests, all that there are."""
    deadline = time.monotonic() + _MOST_SECONDS
    found: list[Any] = []
    while len(found) < count:
        result = manager.get_result(timeout=max(0.0, deadline - time.monotonic()))
        if result is None:
            raise TimeoutError(f"no answer within {_MOST_SECONDS:g} seconds")
        if result.error is not None:
            raise RuntimeError(result.error)
        found.append(result)
    return found


def _median_step(times: Sequence[Sequence[float]]) -> float:
    """Seconds between two tokens of all answers, given when each of theirs came."""
    begun, ended = max(each[0] for each in times), min(each[-1] for each in times)
    last = max(times, key=lambda each: each[0])
    together = [at for at in last if begun <= at <= ended]
    return statistics.median(late - early for early, late in itertools.pairwise(together))
