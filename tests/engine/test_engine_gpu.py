"""The engine on a GPU: CUDA graphs and compiled layers give what passes without them give, in any company."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_harness import MemorySource, RandomPrompts, config, full_float32
from transformers import AutoModelForCausalLM

from memkv.bench import random_model as shapes
from memkv.engine.engine import Engine
from memkv.engine.generation import GenerationResult
from memkv.engine.request import GenerateRequest
from memkv.engine.reuse import Exact, Head, Map, ReusePolicy, Select
from memkv.engine.sampler import Sampling
from memkv.kernels import cuda
from memkv.model.attention import ATTENTION_NAME
from memkv.model.compilation import uncompiled
from memkv.model.loader import LoadedModel

HAS_GPU = torch.cuda.is_available() and cuda.built()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU, or no kernels for it")]

DEVICE = "cuda"
VOCAB_SIZE = 1000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
POLICIES: tuple[ReusePolicy, ...] = (Exact(), Map(), Head(1), Select(0.4))
NEW_TOKENS = 24
NEAR = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # top two logits, between which rounding may choose


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    with full_float32(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "test", SHAPE)
        yield shapes.random_model("test", request.param, DEVICE)


@pytest.fixture(scope="module")
def engine(model: LoadedModel) -> Iterator[Engine]:
    with Engine(model, "bfloat16", config(pool_bytes=400_000_000, host_bytes=200_000_000)) as engine:
        yield engine
        engine.check_integrity()


def requests_of(prompts: RandomPrompts, count: int) -> list[GenerateRequest]:
    chunks = [prompts.chunk(60 + 7 * index) for index in range(12)]
    return [
        GenerateRequest(
            prompts.prefix,
            tuple(prompts.random.sample(chunks, 4)),
            prompts.ids(5 + index % 30),
            block_size=16,
            policy=POLICIES[index % len(POLICIES)],
            sampling=Sampling(max_tokens=NEW_TOKENS, ignore_eos=True),
            keep_logits=1,
        )
        for index in range(count)
    ]


def assert_same(one: GenerationResult, other: GenerationResult, dtype: torch.dtype) -> None:
    """The same tokens, up to where two logits are as good as equal."""
    assert one.logits is not None and other.logits is not None
    for place, (mine, its) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        if mine != its:
            top = one.logits[place].topk(2).values
            assert float(top[0] - top[1]) <= NEAR[dtype], f"token {place} is another one"
            return
    error = float((one.logits - other.logits).abs().max())
    assert error <= (1e-2 if dtype == torch.float32 else 0.1) * float(one.logits.abs().max())


def test_graphs_give_what_passes_without_them_give(model: LoadedModel, engine: Engine) -> None:
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=1), MemorySource()
    requests = requests_of(prompts, 8)
    graphed = [engine.generate(request, source).result(120) for request in requests]
    graphs = engine._thread._runner._graphs
    assert graphs is not None and graphs._graphs and not graphs._fails
    assert {shape.layers for _, shape in graphs._graphs} > {()}, "no look had a graph"
    engine._thread._runner._graphs = None
    try:
        plain = [engine.generate(replace(each, reuse="auto"), source).result(120) for each in requests]
    finally:
        engine._thread._runner._graphs = graphs
    for one, other in zip(graphed, plain, strict=True):
        assert_same(one, other, model.module.dtype)


@torch.inference_mode()
def expected_logits(model: LoadedModel, request: GenerateRequest, result: GenerationResult) -> torch.Tensor:
    """transformers', behind the prompt and each token of the answer but the last."""
    row = torch.tensor([request.prompt_ids.tolist() + result.token_ids[:-1]], device=DEVICE)
    model.module.set_attn_implementation("sdpa")
    try:
        with uncompiled(model):
            logits: torch.Tensor = model.module(row, use_cache=False, logits_to_keep=NEW_TOKENS).logits[0]
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)
    return logits.float()


def test_the_engine_gives_what_transformers_gives(model: LoadedModel, engine: Engine) -> None:
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=2), MemorySource()
    request = replace(requests_of(prompts, 1)[0], reuse="off")
    result = engine.generate(request, source).result(120)
    expected = expected_logits(model, request, result)
    assert result.logits is not None
    error = float((result.logits - expected).abs().max())
    assert error <= (2e-2 if model.module.dtype == torch.float32 else 0.1) * float(expected.abs().max())


@pytest.mark.parametrize(("policy", "num_chunks"), [(Exact(), 4), (Exact(), 1), (Select(0.4), 1)])
def test_in_float32_throughout_the_tokens_are_transformers(
    model: LoadedModel, policy: ReusePolicy, num_chunks: int
) -> None:
    """The reference kernels, which run without graphs. Of a prompt of one chunk, any policy is exact."""
    if model.module.dtype != torch.float32:
        pytest.skip("a model in float32 only")
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=5), MemorySource()
    with Engine(model, "float32", config()) as engine:
        for request in requests_of(prompts, 6):
            request = replace(request, chunks=request.chunks[:num_chunks], pieces=(), policy=policy)
            result = engine.generate(request, source).result(120)
            expected = expected_logits(model, request, result)
            assert result.logits is not None
            assert float((result.logits - expected).abs().max()) <= 1e-3
            assert result.token_ids == expected.argmax(dim=-1).tolist()


@torch.inference_mode()
def test_in_bfloat16_it_is_as_near_to_float32_as_transformers(model: LoadedModel, engine: Engine) -> None:
    """The same weights in float32 on the CPU say what is right."""
    if model.module.dtype != torch.bfloat16:
        pytest.skip("a model in bfloat16 only")
    shape = copy.deepcopy(model.module.config)  # which says whose attention it is
    oracle = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation="sdpa").eval()
    oracle.load_state_dict(model.module.state_dict())
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=8), MemorySource()
    ours, theirs = [], []
    for request in requests_of(prompts, 8):
        request = replace(request, policy=Exact())
        result = engine.generate(request, source).result(120)
        row = torch.tensor([request.prompt_ids.tolist() + result.token_ids[:-1]])
        right = oracle(row, use_cache=False, logits_to_keep=NEW_TOKENS).logits[0]
        assert result.logits is not None
        ours.append(result.logits.cpu() - right)
        theirs.append(expected_logits(model, request, result).cpu() - right)
        drawn = right.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert float((right.max(dim=1).values - drawn).max()) <= NEAR[torch.bfloat16], "not one of the best"
    error, its = (float(torch.cat(errors).square().mean().sqrt()) for errors in (ours, theirs))
    assert 0.0 < error <= 1.5 * its


def test_64_at_once_give_the_very_tokens_that_they_give_alone_in_float32_throughout(
    model: LoadedModel,
) -> None:
    if model.module.dtype != torch.float32:
        pytest.skip("a model in float32 only")
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=9), MemorySource()
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    requests = [replace(request, sampling=sampling) for request in requests_of(prompts, 64)]
    with Engine(model, "float32", config(pool_bytes=400_000_000)) as engine:
        alone = [engine.generate(request, source).result(120).token_ids for request in requests]
        together = [engine.generate(request, source) for request in requests]
        assert [generation.result(120).token_ids for generation in together] == alone
        engine.check_integrity()


def test_64_at_once_give_what_they_give_alone(model: LoadedModel, engine: Engine) -> None:
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=3), MemorySource()
    requests = requests_of(prompts, 64)
    alone = [engine.generate(request, source).result(120) for request in requests]
    together = [engine.generate(request, source) for request in requests]
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other.result(120), model.module.dtype)
    engine.check_integrity()


def test_chunks_that_come_from_host_memory_while_others_answer_are_the_same(
    model: LoadedModel, engine: Engine
) -> None:
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=6), MemorySource()
    requests = requests_of(prompts, 12)
    before = [engine.generate(request, source).result(120) for request in requests]
    other = replace(requests[0], sampling=Sampling(max_tokens=600, ignore_eos=True), keep_logits=0)
    answering = engine.generate(other, source)
    for request, expected in zip(requests[1:], before[1:], strict=True):
        loaded = engine.stats().lanes[0].counters.host_loaded_bytes
        engine.evict([ref.input_key for ref in request.chunks])
        assert_same(expected, engine.generate(request, source).result(120), model.module.dtype)
        assert engine.stats().lanes[0].counters.host_loaded_bytes > loaded
    answering.result(120)
    engine.check_integrity()


def test_a_timeline_counts_a_gpus_copies_and_passes_from_the_request(
    model: LoadedModel, engine: Engine
) -> None:
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=7), MemorySource()
    request = replace(requests_of(prompts, 1)[0], policy=Select(0.4), sampling=Sampling(max_tokens=1))
    engine.generate(request, source).result(120)
    engine.evict([ref.input_key for ref in request.chunks])
    with engine.timeline() as events:
        asked = time.monotonic()
        ttft = engine.generate(request, source).result(120).timings.ttft_ms / 1e3
    copies, *passes = (
        [event for event in events if event.what == what]
        for what in ("to the device", "looking pass", "fresh pass")
    )
    assert len(copies) == 4 and [len(each) for each in passes] == [1, 1]
    times = [max(event.end for event in copies), *(time for (event,) in passes for time in event[1:])]
    assert times == sorted(times), "each needs the one before it"
    assert all(asked - 1e-3 <= each.start <= each.end <= asked + ttft + 1e-3 for each in events)


def test_decode_of_many_over_the_same_chunk_is_read_together(engine: Engine) -> None:
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=4), MemorySource()
    chunk = prompts.chunk(6000)
    requests = [
        GenerateRequest(
            prompts.prefix,
            (chunk,),
            prompts.ids(9),
            block_size=16,
            policy=Map(),
            sampling=Sampling(max_tokens=NEW_TOKENS, ignore_eos=True),
            keep_logits=1,
        )
        for _ in range(60)
    ]
    alone = [engine.generate(request, source).result(120) for request in requests[:5]]
    together = [engine.generate(request, source) for request in requests]
    found = [generation.result(120) for generation in together]
    for one, other in zip(alone, found, strict=False):
        assert_same(one, other, torch.bfloat16)
    graphs = engine._thread._runner._graphs
    assert graphs is not None
    assert any(shape.shares for _, shape in graphs._graphs), "no step read it together"
