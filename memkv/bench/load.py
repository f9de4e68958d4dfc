"""`memkv bench load`: a trace replayed at a stated rate, with and without reuse.

Requests come when the trace says, whatever became of the earlier ones. A request is good where its first
token came within one objective, and the mean time between its tokens is within the other. Whatever is not
finished when time is up is cut off, and counts with the time that it had waited.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from memkv.bench.engine_store import BenchStore
from memkv.bench.trace import TracePrompts, TraceRequest
from memkv.config import EngineConfig
from memkv.engine.engine import Engine
from memkv.engine.environment import cpu_name, versions
from memkv.engine.generation import Generation
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import KVSource
from memkv.engine.reuse import parse_policy
from memkv.errors import BadRequestError, MemKVError
from memkv.model.loader import LoadedModel

Tell = Callable[[str], None]
_NUM_FIRST = 3  # requests of the trace that are asked, and forgotten, before it is replayed


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    ttft_ms: float = 2000.0
    itl_ms: float = 100.0


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replay; times in milliseconds, but for `seconds`.

    Attributes:
        rate: how much faster than in the trace requests came.
        reuse: "on" or "off".
        requests: that came; `finished` of them, `refused` of them at once.
        goodput: good requests per second, from the first request to the last token.
        good_share: of all requests.
        ttft_*: from when the request came.
        itl_*: between two tokens of an answer, all of them.
        tokens_per_s: of answers.
        cached_share: of the prompt tokens of finished requests, those mapped.
        bodies: distinct chunks that stand for those of the trace.
    """

    rate: float
    reuse: str
    policy: str
    requests: int
    finished: int
    refused: int
    objectives: Objectives
    goodput: float
    good_share: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float
    cached_share: float
    seconds: float
    bodies: int


class LoadSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is replayed; see `replay`."""

    rates: tuple[float, ...] = (1.0,)
    policies: tuple[str, ...] = ("exact", "select:0.1", "map")
    objectives: Objectives = Objectives()
    grace_seconds: float = 60.0
    bodies: int = 64


class LoadBench(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    model: str
    dtype: str
    kv_dtype: str
    versions: dict[str, str]
    left_out: int  # requests of the trace that are longer than the model's context
    load: list[LoadRow]


def replay(
    engine: Engine,
    prompts: TracePrompts,
    trace: Sequence[TraceRequest],
    policy: str,
    *,
    rate: float,
    objectives: Objectives,
    grace_seconds: float,
) -> LoadRow:
    """Sends the requests of a trace to an engine, and says how it did.

    Args:
        trace: at least one request.
        policy: "off", or the name of the policy to reuse with.
        rate: 2.0: twice as fast as in the trace.
        grace_seconds: what is not finished so long after the last request came is cut off.
    """
    waiting = [(asked.timestamp / 1e3 / rate, prompts.request(asked, policy)) for asked in trace]
    first = waiting[0][0]
    started = time.monotonic()
    answers = []
    for due, request in waiting:
        time.sleep(max(0.0, started + due - first - time.monotonic()))
        answers.append(_Answer(engine, prompts, request, started + due - first))
    deadline = time.monotonic() + grace_seconds
    for answer in answers:
        answer.wait(deadline)
    for answer in answers:
        answer.cut_off()
    seconds = max(answer.ended for answer in answers) - started
    gaps = np.concatenate([answer.gaps_ms for answer in answers])
    ttft = np.array([answer.ttft_ms for answer in answers])
    num_good = sum(answer.is_good(objectives) for answer in answers)
    finished = [answer for answer in answers if answer.is_finished]
    prompt_tokens = sum(answer.prompt_tokens for answer in finished)
    return LoadRow(
        rate=rate,
        reuse="off" if policy == "off" else "on",
        policy=policy,
        requests=len(answers),
        finished=len(finished),
        refused=sum(answer.is_refused for answer in answers),
        objectives=objectives,
        goodput=num_good / seconds,
        good_share=num_good / len(answers),
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        itl_p50_ms=_percentile(gaps, 50),
        itl_p99_ms=_percentile(gaps, 99),
        tokens_per_s=sum(len(answer.tokens) for answer in answers) / seconds,
        cached_share=sum(answer.cached_tokens for answer in finished) / max(1, prompt_tokens),
        seconds=seconds,
        bodies=prompts.num_bodies,
    )


def run_load_bench(
    model: LoadedModel,
    kv_dtype: str,
    config: EngineConfig,
    trace: Sequence[TraceRequest],
    sizes: LoadSizes,
    directory: str | None,
    tell: Tell = lambda words: None,
) -> LoadBench:
    """Replays a trace without reuse and with each policy, at each rate, all by one engine.

    Args:
        trace: what is longer than the model's context is left out.
        directory: where the files of the bodies are kept meanwhile; the system's temporary one by default.

    Raises:
        BadRequestError: no request is left, or there is no such policy.
    """
    for policy in sizes.policies:
        parse_policy(policy)
    fitting = [asked for asked in trace if asked.num_tokens <= model.spec.max_context]
    if not fitting:
        raise BadRequestError(
            f"the trace has no request that fits the model's context of {model.spec.max_context} tokens",
            hint="take more of it with --seconds, or a model of a longer context",
        )
    with (
        tempfile.TemporaryDirectory(prefix="memkv-bench-", dir=directory) as folder,
        BenchStore(Path(folder)) as store,
        Engine(model, kv_dtype, config) as engine,
    ):
        tell("computing the chunks")
        prompts = TracePrompts(store, model.spec.vocab_size, sizes.bodies)
        prompts.prepare(engine)
        rows = []
        for rate in sizes.rates:
            for policy in ("off", *sizes.policies):
                tell(f"rate {rate:g}: {policy}")
                for asked in fitting[:_NUM_FIRST]:
                    short = msgspec.structs.replace(asked, output_length=min(asked.output_length, 8))
                    engine.generate(prompts.request(short, policy), prompts).result()
                prompts.forget(engine, fitting)
                row = replay(
                    engine,
                    prompts,
                    fitting,
                    policy,
                    rate=rate,
                    objectives=sizes.objectives,
                    grace_seconds=sizes.grace_seconds,
                )
                rows.append(row)
                tell(f"rate {rate:g}: {policy}: {_in_short(row)}")
                prompts.forget(engine, fitting)
    return LoadBench(
        device=torch.cuda.get_device_name(model.device) if model.device.startswith("cuda") else cpu_name(),
        model=model.name,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
        versions=versions(),
        left_out=len(trace) - len(fitting),
        load=rows,
    )


def _in_short(row: LoadRow) -> str:
    """So that a replay is not lost with the ones behind it."""
    return (
        f"{row.good_share:.0%} of {row.requests} requests good, {row.goodput:.2f} a second; first token "
        f"{row.ttft_p50_ms:.0f} ms (p99 {row.ttft_p99_ms:.0f}), between tokens {row.itl_p50_ms:.0f} ms "
        f"(p99 {row.itl_p99_ms:.0f})"
    )


class _Answer:
    """One request on its way, with a thread that takes its tokens as a client would.

    Attributes:
        came: when it was due; times in seconds of `time.monotonic`.
        tokens: when each of its tokens came.
        ended: when it finished, failed or was cut off.
    """

    def __init__(self, engine: Engine, source: KVSource, request: GenerateRequest, came: float) -> None:
        self.came = came
        self.tokens: list[float] = []
        self.ended = 0.0
        self.is_finished = self.is_refused = False
        self.prompt_tokens = self.cached_tokens = 0
        self._generation: Generation | None = None
        self._time_is_up = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(engine, source, request), daemon=True)
        self._thread.start()

    @property
    def ttft_ms(self) -> float:
        return 1e3 * ((self.tokens[0] if self.tokens else self.ended) - self.came)

    @property
    def gaps_ms(self) -> NDArray[np.float64]:
        """[number of tokens - 1]"""
        return 1e3 * np.diff(np.array(self.tokens))

    def is_good(self, objectives: Objectives) -> bool:
        gaps = self.gaps_ms
        mean = gaps.mean() if len(gaps) else 0.0
        return bool(self.is_finished and self.ttft_ms <= objectives.ttft_ms and mean <= objectives.itl_ms)

    def wait(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def cut_off(self) -> None:
        """Does nothing once it has ended."""
        self._time_is_up.set()
        if self._generation is not None:
            self._generation.cancel()
        self._thread.join()

    def _ask(self, engine: Engine, source: KVSource, request: GenerateRequest) -> None:
        try:
            self._generation = engine.generate(request, source)
        except MemKVError:
            self.is_refused = True
        else:
            self._take(self._generation)
        self.ended = time.monotonic()

    def _take(self, generation: Generation) -> None:
        if self._time_is_up.is_set():
            generation.cancel()
        with suppress(MemKVError):
            for _ in generation:
                self.tokens.append(time.monotonic())
            result = generation.result()
            self.is_finished = result.finish_reason == "length"
            self.prompt_tokens, self.cached_tokens = result.usage.prompt_tokens, result.usage.cached_tokens


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    """0 where there are none."""
    return float(np.percentile(values, percent)) if len(values) else 0.0
