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
from dataclasses import dataclass, replace
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

_ANSWERS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows that graphs have
_PROMPT = (0, 16, 32, 64, 96, 128, 192, 256, 384, 512)
_SEGMENTS = (16, 128, 1024, 8192)
_ENTRIES = (256, 2048, 16_384, 131_072)
_MOST_TOKENS = _ANSWERS[-1] + _PROMPT[-1]
_MOST_GRAPHS = 64  # of one engine; the one that was used least lately goes

Run = Callable[[StepTensors, KVCache], StepResult]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a graph is captured for: room, and what runs at all.

    Attributes:
        answers: sequences of one row.
        prompt: rows of the sequence behind them; 0 without one.
        segments, entries: of the block tables.
        logits: whether a row of each sequence is wanted.
        layers: whose attention mass is wanted.
        shares: whether answers may read blocks together.
    """

    answers: int
    prompt: int
    segments: int
    entries: int
    logits: bool
    layers: tuple[int, ...]
    shares: bool

    @property
    def num_rows(self) -> int:
        return self.answers + self.prompt

    @property
    def num_seqs(self) -> int:
        return self.answers + bool(self.prompt)

    @property
    def query_start(self) -> Int32s:
        """[num_seqs + 1]"""
        starts = np.arange(self.num_seqs + 1, dtype=np.int32)
        starts[-1] = self.num_rows
        return starts


def shape_of(batch: Batch, host: dict[str, Int32s], layers: tuple[int, ...]) -> GraphShape | None:
    """As if no answers shared blocks.

    None where no graph is made for such a batch: many tokens, two prompts, a prompt that looks in part.
    """
    answers, prompt = _split(batch)
    if any(len(each) > 1 for each in batch.positions[:-1]) or len(batch.logit_rows) > answers + bool(prompt):
        return None
    if len(batch.looks) > 1 or (batch.looks and not prompt):
        return None
    rooms = (
        _room(answers, _ANSWERS),
        _room(prompt, _PROMPT),
        _room(len(host["segments"]), _SEGMENTS),
        _room(len(host["block_ids"]), _ENTRIES),
    )
    if None in rooms:
        return None
    return GraphShape(*rooms, logits=bool(batch.logit_rows), layers=layers, shares=False)  # type: ignore[arg-type]


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
        "sources": of_rows(batch.sources, -1, np.int64),
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
        self._stream: Any = None  # where they are captured
        self._fails = False

    def run(self, batch: Batch, host: dict[str, Int32s], kv_cache: KVCache) -> StepResult | None:
        """The batch's pass, or None where it has to be run without a graph.

        Args:
            host: `batch.plan()`.

        Raises:
            KernelArgumentError: a block id is outside the cache.
        """
        if self._fails or batch.num_tokens > _MOST_TOKENS or not cuda.serves_cache(kv_cache.layer(0)[0]):
            return None
        if sum(map(len, batch.fed)) > _MOST_TOKENS:
            return None
        layout = kv_cache.layout
        layers = tuple(batch.looks[0].request.layer_indices(layout.num_layers)) if batch.looks else ()
        shape = shape_of(batch, host, layers)
        if shape is None:
            return None
        plan = AttentionPlan.of_arrays(host, {name: torch.from_numpy(array) for name, array in host.items()})
        plan.validate(kv_cache.num_blocks, layout.block_size)
        group = self._num_heads // layout.num_kv_heads
        shape = replace(shape, shares=cuda.worth_sharing(plan, layout.num_kv_heads, group, layout.head_dim))
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
            self._stream = torch.cuda.Stream(kv_cache.device)  # type: ignore[no-untyped-call]
        graph = _Graph(shape, kv_cache)
        graph.capture(arrays, self._run, self._pool, self._stream)
        return graph


class _Graph:
    """One captured pass: where its inputs are put, and where its results are found."""

    def __init__(self, shape: GraphShape, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        num_seqs, rows = shape.num_seqs, shape.num_rows
        int64, int32 = torch.int64, torch.int32
        self._inputs = StaticArrays(
            {
                "token_ids": (int64, (rows,)),
                "positions": (int64, (rows,)),
                "slots": (int64, (rows,)),
                "sources": (int64, (rows,)),
                "logit_rows": (int64, (num_seqs if shape.logits else 0,)),
                "query_start": (int32, (num_seqs + 1,)),
                "query_position": (int32, (rows,)),
                "segment_start": (int32, (num_seqs + 1,)),
                "segments": (int32, (shape.segments, 4)),
                "block_ids": (int32, (shape.entries,)),
            },
            kv_cache.device,
        )
        tensors = dict(self._inputs.tensors)
        names = ("token_ids", "positions", "slots", "sources", "logit_rows")
        of_rows = {name: tensors.pop(name) for name in names}
        self._fed = torch.zeros(_MOST_TOKENS, dtype=int64, device=kv_cache.device)
        plan = AttentionPlan.of_changing(
            shape.query_start,
            tensors,
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.layout.block_size,
            may_share=shape.shares,
        )
        masses = [MassRequest(slice(None), shape.layers)] if shape.layers else []
        self._step = StepTensors(**of_rows, fed=self._fed, plan=plan, masses=masses)
        self._graph = torch.cuda.CUDAGraph()
        self._result = StepResult(None)

    def capture(self, arrays: dict[str, np.ndarray], run: Run, pool: Any, stream: Any) -> None:
        """Runs the pass once, for what is made at first use, then captures it. `arrays`: any that fit.

        `torch.cuda.graph` would do it too, and first give all unused memory back to the driver, which takes
        longer than all the rest.
        """
        self._inputs.fill(arrays)
        run(self._step, self._kv_cache)
        self._step.plan.refresh()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._graph.capture_begin(
                pool, capture_error_mode="thread_local"
            )  # others may use the GPU meanwhile
            try:
                self._result = run(self._step, self._kv_cache)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self, arrays: dict[str, np.ndarray], batch: Batch) -> StepResult:
        """The results are copies: the next replay of any graph writes over its own."""
        self._inputs.fill(arrays)
        if batch.fed:
            fed = torch.cat(batch.fed) if len(batch.fed) > 1 else batch.fed[0]
            self._fed[: len(fed)].copy_(fed)
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


def _room(count: int, rooms: tuple[int, ...]) -> int | None:
    """The least of them that is enough."""
    return next((room for room in rooms if room >= count), None)
