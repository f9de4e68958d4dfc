"""Passes of few tokens as CUDA graphs: captured where the first of a shape runs, replayed for all others.

    packed row of a batch    answers: a row each | rows of one prompt
    packed row of a graph    answers        pad  | rows of one prompt    pad

A graph has room for more than its batch has. A padded row has no slot and sees nothing, a padded sequence
has no segments, and what lies behind the last segment and entry is nobody's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memkv.engine.batch import Batch
from memkv.engine.kv_cache import KVCache
from memkv.engine.staging import StaticArrays
from memkv.engine.step_tensors import MassRequest, StepResult, StepTensors
from memkv.engine.token_run import Int32s
from memkv.kernels import AttentionPlan, cuda

_log = logging.getLogger(__name__)

_ROWS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LEAST_PROMPT, _LEAST_SEGMENTS, _LEAST_ENTRIES = 16, 16, 256
_MOST_GRAPHS = 64  # of one engine; the one that was used least lately goes

Run = Callable[[StepTensors, KVCache], StepResult]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a graph is captured for: room, and what runs at all.

    Attributes:
        answers: sequences of one row.
        prompt: rows of the sequence behind them; 0 without one.
        segments, entries: of the block tables.
        logits: rows whose logits are returned.
        layers: whose attention mass is wanted.
        shares: whether answers may read blocks together.
    """

    answers: int
    prompt: int
    segments: int
    entries: int
    logits: int
    layers: tuple[int, ...]
    shares: bool

    @property
    def num_rows(self) -> int:
        return self.answers + self.prompt

    @property
    def query_start(self) -> Int32s:
        """[num sequences + 1]"""
        starts = np.arange(self.answers + 1 + bool(self.prompt), dtype=np.int32)
        starts[-1] = self.num_rows
        return starts


def shape_of(
    batch: Batch, host: dict[str, Int32s], layers: tuple[int, ...], *, shares: bool
) -> GraphShape | None:
    """None where no graph is made for such a batch: many tokens, two prompts, a prompt that looks in part."""
    answers, prompt = _split(batch)
    sizes = [len(each) for each in batch.positions]
    num_logits = len(batch.logit_rows)
    if any(size > 1 for size in sizes[:-1]) or max(answers, prompt, num_logits) > _ROWS[-1]:
        return None
    if len(batch.looks) > 1 or (batch.looks and not prompt) or num_logits > answers + bool(prompt):
        return None
    return GraphShape(
        answers=_room(answers),
        prompt=_room(max(prompt, _LEAST_PROMPT)) if prompt else 0,
        segments=_power(len(host["segments"]), _LEAST_SEGMENTS),
        entries=_power(len(host["block_ids"]), _LEAST_ENTRIES),
        logits=_room(num_logits),
        layers=layers,
        shares=shares,
    )


def padded(batch: Batch, host: dict[str, Int32s], shape: GraphShape) -> dict[str, np.ndarray]:
    """A batch's arrays with room for as many rows as the shape has."""
    answers, _ = _split(batch)
    rows = np.arange(batch.num_tokens)
    rows[answers:] += shape.answers - answers
    positions = np.concatenate(batch.positions)

    def of_rows(values: np.ndarray, pad: int, dtype: type) -> np.ndarray:
        room: np.ndarray = np.full(shape.num_rows, pad, dtype=dtype)
        room[rows] = values
        return room

    starts = host["segment_start"]
    segment_start = np.full(len(shape.query_start), starts[answers], dtype=np.int32)
    segment_start[: answers + 1] = starts[: answers + 1]
    segment_start[-1] = starts[-1]
    return {
        "token_ids": of_rows(batch.token_ids, 0, np.int64),
        "positions": of_rows(positions, 0, np.int64),
        "slots": of_rows(batch.slots, -1, np.int64),
        "logit_rows": rows[batch.logit_rows],
        "query_start": shape.query_start,
        "query_position": of_rows(positions, -1, np.int32),
        "segment_start": segment_start,
        "segments": host["segments"],
        "block_ids": host["block_ids"],
    }


class StepGraphs:
    """The graphs of one engine. Belongs to the engine's thread.

    Args:
        run: a pass, which may be captured.
        num_heads: of queries.
    """

    def __init__(self, run: Run, num_heads: int) -> None:
        self._run = run
        self._num_heads = num_heads
        self._graphs: OrderedDict[tuple[KVCache, GraphShape], _Graph] = OrderedDict()
        self._pool: Any = None  # memory that lasts for a replay, shared by all
        self._fails = False

    def run(self, batch: Batch, host: dict[str, Int32s], kv_cache: KVCache) -> StepResult | None:
        """The batch's pass, or None where it has to be run without a graph.

        Args:
            host: `batch.plan()`.

        Raises:
            KernelArgumentError: a block id is outside the cache.
        """
        if self._fails or batch.num_tokens > 2 * _ROWS[-1] or not cuda.serves_cache(kv_cache.layer(0)[0]):
            return None
        layout = kv_cache.layout
        plan = AttentionPlan.of_arrays(host, {name: torch.from_numpy(array) for name, array in host.items()})
        plan.validate(kv_cache.num_blocks, layout.block_size)
        group = self._num_heads // layout.num_kv_heads
        shares = cuda.worth_sharing(plan, layout.num_kv_heads, group, layout.head_dim)
        layers = tuple(batch.looks[0].request.layer_indices(layout.num_layers)) if batch.looks else ()
        shape = shape_of(batch, host, layers, shares=shares)
        if shape is None:
            return None
        graph = self._graphs.get((kv_cache, shape))
        arrays = padded(batch, host, shape)
        if graph is None:
            try:
                graph = self._capture(arrays, shape, kv_cache)
            except RuntimeError as error:
                _log.warning("steps are run without CUDA graphs: %s", error)
                self._fails = True
                return None
            self._graphs[kv_cache, shape] = graph
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end((kv_cache, shape))
        return graph.replay(arrays, batch)

    def _capture(self, arrays: dict[str, np.ndarray], shape: GraphShape, kv_cache: KVCache) -> _Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = _Graph(shape, kv_cache)
        graph.capture(arrays, self._run, self._pool)
        return graph


class _Graph:
    """One captured pass: where its inputs are put, and where its results are found."""

    def __init__(self, shape: GraphShape, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        num_seqs, rows = len(shape.query_start) - 1, shape.num_rows
        int64, int32 = torch.int64, torch.int32
        self._inputs = StaticArrays(
            {
                "token_ids": (int64, (rows,)),
                "positions": (int64, (rows,)),
                "slots": (int64, (rows,)),
                "logit_rows": (int64, (shape.logits,)),
                "query_start": (int32, (num_seqs + 1,)),
                "query_position": (int32, (rows,)),
                "segment_start": (int32, (num_seqs + 1,)),
                "segments": (int32, (shape.segments, 4)),
                "block_ids": (int32, (shape.entries,)),
            },
            kv_cache.device,
        )
        tensors = dict(self._inputs.tensors)
        of_rows = {name: tensors.pop(name) for name in ("token_ids", "positions", "slots", "logit_rows")}
        plan = AttentionPlan.of_changing(
            shape.query_start,
            tensors,
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.layout.block_size,
            may_share=shape.shares,
        )
        masses = [MassRequest(slice(None), shape.layers)] if shape.layers else []
        self._step = StepTensors(**of_rows, plan=plan, masses=masses)
        self._graph = torch.cuda.CUDAGraph()
        self._result = StepResult(None)

    def capture(self, arrays: dict[str, np.ndarray], run: Run, pool: Any) -> None:
        """Runs the pass once, for what is made at first use, then captures it. `arrays`: any that fit."""
        self._inputs.fill(arrays)
        run(self._step, self._kv_cache)
        self._step.plan.refresh()
        capture = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        with capture:  # other threads may use the GPU meanwhile
            self._result = run(self._step, self._kv_cache)

    def replay(self, arrays: dict[str, np.ndarray], batch: Batch) -> StepResult:
        """The results are copies: the next replay of any graph writes over its own."""
        self._inputs.fill(arrays)
        self._graph.replay()
        logits = self._result.logits
        return StepResult(
            None if logits is None else logits[: len(batch.logit_rows)].clone(),
            [self._result.masses[0][look.entries].clone() for look in batch.looks],
        )


def _split(batch: Batch) -> tuple[int, int]:
    """Sequences of one row, and rows of the one behind them."""
    last = len(batch.positions[-1])
    return (len(batch.positions), 0) if last == 1 else (len(batch.positions) - 1, last)


def _room(count: int) -> int:
    return next(room for room in _ROWS if room >= count)


def _power(count: int, least: int) -> int:
    """The power of two that has room for so many."""
    return max(least, 1 << (count - 1).bit_length())
