"""An engine's timeline: what it did while it was asked, and nothing otherwise."""

from __future__ import annotations

from engine_harness import MemorySource, RandomPrompts, config

from memkv.bench.random_model import random_model
from memkv.engine.engine import Engine
from memkv.engine.request import GenerateRequest
from memkv.engine.reuse import Select
from memkv.engine.sampler import Sampling


def test_it_has_what_was_done_meanwhile() -> None:
    model = random_model("tiny", "float32", "cpu")
    prompts, source = RandomPrompts(model.spec.vocab_size), MemorySource()
    chunks = (prompts.chunk(60), prompts.chunk(70))
    request = GenerateRequest(
        prompts.prefix,
        chunks,
        prompts.ids(9),
        policy=Select(0.3),
        sampling=Sampling(max_tokens=3, ignore_eos=True),
    )
    with Engine(model, "bfloat16", config(host_bytes=10_000_000)) as engine:
        engine.generate(request, source).result(60)
        engine.drop([ref.input_key for ref in chunks])
        (lane,) = engine._thread.lanes.values()
        assert not lane.steps.timeline._events and not lane.steps.timeline._watched, "nobody asked"
        with engine.timeline() as events:
            engine.generate(request, source).result(60)
            engine.evict([chunks[0].input_key])
            engine.generate(request, source).result(60)
        engine.generate(request, source).result(60)
        with engine.timeline() as later:
            pass
    names = [event.what for event in events]
    once = ["looking pass", "fresh pass", "token", "token"]
    assert sorted(names) == sorted(["to the host pool"] * 2 + ["to the device"] * 3 + once * 2)
    assert [event.start for event in events] == sorted(event.start for event in events)
    assert all(event.start <= event.end for event in events)
    assert names[-len(once) :] == once
    assert later == []
