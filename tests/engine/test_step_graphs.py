"""Batches in the room that a graph has: the same rows see the same keys."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from memkv.engine.batch import Batch, Part
from memkv.engine.kv_cache import KVCache
from memkv.engine.reuse.policy import LookRequest
from memkv.engine.step_graphs import GraphShape, StepGraphs, padded, shape_of
from memkv.engine.step_tensors import StepResult
from memkv.engine.token_run import TokenRun
from memkv.kernels import AttentionPlan, cuda, reference
from memkv.kv.block_table import BlockTable, Segment
from memkv.kv.layout import KVLayout

SIZE, HEADS, DIM, BLOCKS = 8, 2, 16, 64
CACHE = KVCache(KVLayout(1, HEADS, DIM, SIZE, "float32"), BLOCKS)


class Sequences:
    """Runs behind mapped chunks, with blocks of their own drawn at random."""

    def __init__(self) -> None:
        self.random = Random(0)
        self.free = self.random.sample(range(BLOCKS), BLOCKS)

    def part(self, rows: int, chunks: tuple[int, ...] = (13, 8, 21)) -> Part[None]:
        table = BlockTable(SIZE)
        for number, tokens in enumerate(chunks):
            table.append(Segment(self.blocks(tokens), tokens, table.end, 7 * number))
        start = table.end
        table.append(Segment(self.blocks(rows), rows, start, start, private=True))
        ids = [self.random.randrange(100) for _ in range(rows)]
        run = TokenRun(table, ids, range(start, start + rows))
        return Part(None, run, rows, num_logits=1)

    def blocks(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(-(-tokens // SIZE)))


def attention(host: dict[str, np.ndarray], q: torch.Tensor) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    k = torch.randn(BLOCKS, HEADS, DIM // 4, SIZE, 4, generator=random)
    v = torch.randn(BLOCKS, HEADS, DIM, SIZE, generator=random)
    plan = AttentionPlan.of_arrays(host, {name: torch.from_numpy(values) for name, values in host.items()})
    return reference.paged_attention(q, k, v, plan, rotation=None, scale=0.3).out


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1), (5,), (1, 17), (1, 1, 1, 1, 1, 40)])
def test_padded_rows_change_nothing_and_see_nothing(sizes: tuple[int, ...]) -> None:
    sequences = Sequences()
    batch = Batch.build([sequences.part(size, (13, 8) if size == 1 else (9,)) for size in sizes])
    host = batch.plan()
    shape = shape_of(batch, host, ())
    assert shape is not None
    arrays = padded(batch, host, shape)
    inputs = {name: arrays[name] for name in host}
    for name in ("segments", "block_ids"):  # what lies behind the last one is nobody's
        room = getattr(shape, {"segments": "segments", "block_ids": "entries"}[name])
        inputs[name] = np.zeros((room, *host[name].shape[1:]), dtype=np.int32)
        inputs[name][: len(host[name])] = host[name]
    q = torch.randn(shape.num_rows, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    rows = np.flatnonzero(arrays["slots"] >= 0)
    assert arrays["slots"][rows].tolist() == batch.slots.tolist()
    assert arrays["token_ids"][rows].tolist() == batch.token_ids.tolist()
    assert arrays["positions"][rows].tolist() == np.concatenate(batch.positions).tolist()
    found = attention(inputs, q)
    assert torch.equal(found[rows], attention(host, q[rows]))
    assert not found[np.flatnonzero(arrays["slots"] < 0)].any()
    assert arrays["logit_rows"].tolist() == rows[batch.logit_rows].tolist()


def test_what_gets_a_graph() -> None:
    sequences = Sequences()
    one, prompt, other = sequences.part(1), sequences.part(40, ()), sequences.part(20, ())
    for parts, expected in (
        ([one], GraphShape(1, 0, 16, 256, True, (), False)),
        ([one, prompt], GraphShape(1, 64, 16, 256, True, (), False)),
        ([other], GraphShape(0, 32, 16, 256, True, (), False)),
        ([prompt, other], None),
        ([prompt, one], None),
    ):
        batch = Batch.build(parts)
        assert shape_of(batch, batch.plan(), ()) == expected


def test_a_batch_that_gets_no_graph_is_left_to_whoever_runs_it_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[AttentionPlan] = []
    monkeypatch.setattr(cuda, "serves_cache", lambda _: True)
    monkeypatch.setattr(AttentionPlan, "validate", lambda plan, *_: checked.append(plan))
    monkeypatch.setattr(cuda, "worth_sharing", lambda *_: False)
    sequences = Sequences()
    prompt, other = sequences.part(40, ()), sequences.part(20, ())
    graphs = StepGraphs(lambda *_: StepResult(None), HEADS)
    batch = Batch.build([prompt, other])
    assert graphs.run(batch, batch.plan(), CACHE) is None
    assert not checked, "it is checked there"
    monkeypatch.setattr(StepGraphs, "_capture", lambda *_: (_ for _ in ()).throw(RuntimeError("no GPU")))
    batch = Batch.build([other])
    assert graphs.run(batch, batch.plan(), CACHE) is None
    assert len(checked) == 1


def test_a_look_gets_a_graph_where_all_its_rows_look() -> None:
    sequences = Sequences()
    part, wanted = sequences.part(20, ()), LookRequest()
    for rows, fits in ((20, True), (8, False)):
        batch = Batch.build([Part(None, part.run, 20, look=wanted, look_rows=rows)])
        assert (shape_of(batch, batch.plan(), (0, 1)) is not None) is fits
        assert batch.looks[0].entries == slice(3 if rows == 8 else 0, 6 if rows == 8 else 3)
