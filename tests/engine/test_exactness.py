"""The engine against transformers alone: the same logits where it claims to be exact, the right keys where it
maps. Everything that is not written is NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import MemorySource, RandomPrompts, config, full_float32
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from memkv.engine.engine import Engine
from memkv.engine.generation import GenerationResult
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import Exact, Head, Map, ReusePolicy, Select, parse_policy
from memkv.engine.sampler import Sampling
from memkv.engine.steps import _Sampled
from memkv.model.loader import LoadedModel, load_model

# its name changes between the versions of transformers that are served
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

TOLERANCE = 1e-3
ORDER = parse_policy("order")
NEW_TOKENS = 12

# Plain, another GQA ratio, scaled RoPE, sliding windows, layers without RoPE, soft-caps, partial rotary.
FAMILIES = ("llama", "llama-mha", "llama-yarn", "ministral", "smollm3", "gemma2", "phi3-partial", "glm")

Setup = tuple[Engine, PreTrainedModel]


ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
PLACES = [
    *(pytest.param((family, "cpu"), id=family) for family in FAMILIES),
    *(pytest.param((family, "cuda"), id=f"{family}-gpu", marks=ON_A_GPU) for family in FAMILIES),
]


@pytest.fixture(scope="module", params=PLACES)
def tiny(request: pytest.FixtureRequest, tiny_model_dir: Callable[[str], Path]) -> Iterator[Setup]:
    """An engine on a device, and transformers on the CPU."""
    family, device = request.param
    with full_float32():
        model = load_model(str(tiny_model_dir(family)), dtype="float32", device=device)
        with Engine(model, "float32", config(compile=False), poison=True) as engine:
            yield engine, tiny_model(family)
            engine.check_integrity()


def generate(engine: Engine, source: MemorySource, request: GenerateRequest) -> GenerationResult:
    result = engine.generate(request, source).result(120)
    return result if result.logits is None else replace(result, logits=result.logits.cpu())


def request_of(
    prompts: RandomPrompts, chunks: tuple[ChunkRef, ...], tail: int, policy: ReusePolicy, **changes: Any
) -> GenerateRequest:
    sampling = Sampling(max_tokens=changes.pop("max_tokens", NEW_TOKENS), ignore_eos=True)
    values = {"block_size": 16, "keep_logits": tail, **changes}
    return GenerateRequest(
        prompts.prefix, chunks, prompts.ids(tail), policy=policy, sampling=sampling, **values
    )


@torch.inference_mode()
def own_forward(model: PreTrainedModel, request: GenerateRequest, result: GenerationResult) -> Tensor:
    """transformers' logits behind the last `keep_logits` prompt tokens and each answer token but the last."""
    ids = torch.tensor([request.prompt_ids.tolist() + result.token_ids[:-1]])
    first = request.prompt_tokens - request.keep_logits
    logits: Tensor = model(ids, logits_to_keep=ids.shape[1] - first).logits[0]
    return logits.float()


def assert_same(result: GenerationResult, expected: Tensor, request: GenerateRequest) -> None:
    assert result.logits is not None
    first = request.prompt_tokens - request.keep_logits
    assert result.logit_positions == tuple(range(first, first + len(expected)))
    assert float((result.logits - expected).abs().max()) <= TOLERANCE
    # the logits that every answer token was drawn from: the greedy answers are the same, token by token
    assert result.token_ids == expected[request.keep_logits - 1 :].argmax(dim=-1).tolist()


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_one_chunk_behind_its_prefix_is_the_models_own_forward(tiny: Setup, block_size: int) -> None:
    engine, model = tiny
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=block_size), MemorySource()
    chunk = prompts.chunk(45)
    kv = engine.prefill(prompts.prefix, [chunk], source, block_size=block_size)
    source.kept[chunk.input_key] = kv[0]
    for policy in (Map(), Exact(), Head(1)):
        request = request_of(prompts, (chunk,), 9, policy, block_size=block_size)
        result = generate(engine, source, request)
        assert result.usage.prefilled_tokens == 9
        assert_same(result, own_forward(model, request, result), request)


@pytest.mark.parametrize("reuse", ["auto", "off"])
@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_exact_and_off_are_the_models_own_forward(tiny: Setup, reuse: str, num_chunks: int) -> None:
    engine, model = tiny
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=num_chunks), MemorySource()
    chunks = tuple(prompts.chunk(30 + 7 * index) for index in range(num_chunks))
    request = request_of(prompts, chunks, 9, Exact(), reuse=reuse)
    result = generate(engine, source, request)
    assert_same(result, own_forward(model, request, result), request)


@torch.inference_mode()
def mapped_by_hand(model: PreTrainedModel, request: GenerateRequest, result: GenerationResult) -> Tensor:
    """Each chunk's keys computed at their places by transformers alone, gathered; the tail run behind them.

    A chunk is prefilled behind the prefix with the position ids of its place in the prompt: for a model whose
    attention depends on differences of positions alone, as RoPE's does, only the distance to the prefix would
    tell; so prefix tokens are given positions moved along with the chunk. What comes out are the chunk's own
    keys, turned to where it is mapped.
    """
    cache, start = mapped_cache(model, request)
    ids = torch.tensor([[*request.tail_ids, *result.token_ids[:-1]]])
    positions = torch.arange(start, start + ids.shape[1])[None]
    logits: Tensor = model(ids, position_ids=positions, past_key_values=cache).logits[0]
    return logits.float()


def mapped_cache(model: PreTrainedModel, request: GenerateRequest) -> tuple[DynamicCache, int]:
    """Keys and values of prefix and chunks at their places, and the position behind them."""
    pieces = [_kv(model, request.prefix.token_ids, 0)]
    start = len(request.prefix.token_ids)
    for chunk in request.chunks:
        context = len(chunk.context_ids)
        both = _kv(model, (*chunk.context_ids, *chunk.token_ids), start - context)
        pieces.append([(k[:, :, context:], v[:, :, context:]) for k, v in both])
        start += chunk.num_tokens
    cache = DynamicCache()
    for layer in range(len(pieces[0])):
        keys, values = (torch.cat([piece[layer][part] for piece in pieces], dim=2) for part in (0, 1))
        cache.update(keys, values, layer)
    return cache, start


def _kv(model: PreTrainedModel, ids: tuple[int, ...], first_position: int) -> list[tuple[Tensor, Tensor]]:
    cache = DynamicCache()
    positions = torch.arange(first_position, first_position + len(ids))[None]
    model(torch.tensor([ids]), position_ids=positions, past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


def test_mapped_chunks_are_keys_turned_to_their_places(tiny: Setup) -> None:
    """Several chunks, relocated; also the same one twice, and one that another request mapped elsewhere."""
    engine, model = tiny
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=5), MemorySource()
    a, b, c = prompts.chunk(45), prompts.chunk(16), prompts.chunk(33)
    for chunks in ((a, b, c), (c, a, b, a)):
        request = request_of(prompts, chunks, 9, Map())
        result = generate(engine, source, request)
        assert_same(result, mapped_by_hand(model, request, result), request)


def test_chunks_of_another_context_are_mapped_as_they_are_and_never_exact(tiny: Setup) -> None:
    """Prefilled behind more than the prefix: as an ingest, and where a query finds none of it."""
    engine, model = tiny
    prompts = RandomPrompts(VOCAB_SIZE, seed=25)
    context = ChunkRef("context", (), (*prompts.prefix.token_ids, *prompts.ids(21)))
    a, b = (
        ChunkRef(f"{name} elsewhere", context.token_ids, prompts.ids(size))
        for name, size in (("a", 45), ("b", 16))
    )
    request = request_of(prompts, (a, b), 9, Map(), context=context)
    healed = generate(engine, MemorySource(), request)
    assert healed.usage.healed_chunks == 4  # prefix and context among them
    assert_same(healed, mapped_by_hand(model, request, healed), request)
    engine.drop([a.input_key, b.input_key, context.input_key])
    source = MemorySource()
    for ref, kv in zip((a, b), engine.prefill(context, [a, b], source, block_size=16), strict=True):
        source.kept[ref.input_key] = kv
    mapped = generate(engine, source, request)
    assert mapped.usage.healed_chunks == 0 and mapped.usage.prefilled_tokens == 9
    assert_same(mapped, mapped_by_hand(model, request, mapped), request)
    exact = replace(request, policy=Exact())
    result = generate(engine, source, exact)
    assert result.usage.prefilled_tokens == a.num_tokens + b.num_tokens + 9
    assert_same(result, own_forward(model, exact, result), exact)


@pytest.mark.parametrize("policy", [Exact(), Map(), Head(1), Select(0.4)])
def test_a_prompt_taken_in_parts_gives_the_same(
    load_tiny: Callable[[str], LoadedModel], policy: ReusePolicy
) -> None:
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=6), MemorySource()
    chunks = tuple(prompts.chunk(40) for _ in range(3))
    request = request_of(prompts, chunks, 30, policy)
    results = []
    for size in (4096, 11):
        with Engine(load_tiny("llama"), "float32", config(max_batch_tokens=size), poison=True) as engine:
            results.append(generate(engine, source, request))
    assert results[0].token_ids == results[1].token_ids
    assert results[0].logits is not None and results[1].logits is not None
    assert float((results[0].logits - results[1].logits).abs().max()) <= 1e-4


def test_company_changes_nothing(load_tiny: Callable[[str], LoadedModel]) -> None:
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=7), MemorySource()
    chunks = [prompts.chunk(30 + index) for index in range(6)]
    requests = [
        request_of(prompts, tuple(prompts.random.sample(chunks, 3)), 5 + index, policy)
        for index, policy in enumerate([Exact(), Map(), Head(1), Select(0.4)] * 3)
    ]
    with Engine(load_tiny("llama"), "float32", config(), poison=True) as engine:
        alone = [generate(engine, source, request) for request in requests]
        together = [engine.generate(request, source) for request in requests]
        for one, other in zip(alone, (generation.result(60) for generation in together), strict=True):
            assert one.token_ids == other.token_ids
            assert one.logits is not None and other.logits is not None
            assert float((one.logits - other.logits).abs().max()) <= 1e-4
        engine.check_integrity()


def test_steps_that_begin_with_tokens_of_the_device_give_the_same(
    load_tiny: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn, among others that end earlier."""
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=17), MemorySource()
    chunks = tuple(prompts.chunk(40) for _ in range(2))
    requests = [
        replace(
            request_of(prompts, chunks, 5 + number, Exact()),
            sampling=Sampling(max_tokens=3 + number, temperature=number % 2, seed=number, ignore_eos=True),
        )
        for number in range(8)
    ]
    found = []
    for ahead in (False, True):
        with Engine(load_tiny("llama"), "float32", config(), poison=True) as engine:
            if ahead:
                engine._thread._runner.runs_ahead = True
                monkeypatch.setattr(_Sampled, "is_here", False)
            generations = [engine.generate(request, source) for request in requests]
            found.append([generation.result(60) for generation in generations])
            engine.check_integrity()
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids and one.logit_positions == other.logit_positions
        assert one.logits is not None and other.logits is not None
        assert float((one.logits - other.logits).abs().max()) <= 1e-4


def test_half_precision_kv_is_close(load_tiny: Callable[[str], LoadedModel]) -> None:
    model = tiny_model("llama")
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=8), MemorySource()
    request = request_of(prompts, (prompts.chunk(45),), 9, Exact(), max_tokens=1)
    with Engine(load_tiny("llama"), "bfloat16", config(), poison=True) as engine:
        result = generate(engine, source, request)
    expected = own_forward(model, request, result)
    assert result.logits is not None
    error = float((result.logits - expected).abs().max())
    assert 1e-4 < error < 0.05 * float(expected.abs().max())


def test_a_prefix_without_tokens_is_served(load_tiny: Callable[[str], LoadedModel]) -> None:
    model = tiny_model("llama")
    prompts, source = RandomPrompts(VOCAB_SIZE, prefix_tokens=0), MemorySource()
    request = request_of(prompts, (prompts.chunk(45), prompts.chunk(20)), 9, Exact())
    with Engine(load_tiny("llama"), "float32", config(), poison=True) as engine:
        result = generate(engine, source, request)
    assert_same(result, own_forward(model, request, result), request)
    assert result.usage.cached_tokens == 0 and result.usage.healed_chunks == 1


# What earlier answers left behind


def conversation(
    engine: Engine, model: PreTrainedModel, prompts: RandomPrompts, turns: int, new_tokens: int
) -> None:
    """Each turn computes its own text only, and answers as transformers does that sees the whole prompt."""
    source = MemorySource()
    chunks = tuple(prompts.chunk(30 + 9 * index) for index in range(3))
    request = request_of(prompts, chunks, 11, Exact(), keep_logits=1, max_tokens=new_tokens)
    result = generate(engine, source, request)
    assert result.usage.prefilled_tokens == 13 + 30 + 39 + 48 + 11  # prefix and first chunk were not there
    assert_same(result, own_forward(model, request, result), request)
    for _ in range(turns - 1):
        text = (*request.tail_ids, *result.token_ids)
        request = request_of(
            prompts, (), 14, Exact(), pieces=(*request.pieces, text), keep_logits=1, max_tokens=new_tokens
        )
        result = generate(engine, source, request)
        assert result.usage.prefilled_tokens == 14 + 1  # the answer's last token was never fed back
        assert_same(result, own_forward(model, request, result), request)
    engine.check_integrity()


def repeated_and_other_questions(engine: Engine, model: PreTrainedModel, prompts: RandomPrompts) -> float:
    """Returns how far apart the logits of the same question asked twice are."""
    source = MemorySource()
    chunks = tuple(prompts.chunk(30 + 9 * index) for index in range(3))
    first = request_of(prompts, chunks, 11, Exact(), keep_logits=1)
    one, other = generate(engine, source, first), generate(engine, source, first)
    assert other.usage.prefilled_tokens == 1
    assert one.token_ids == other.token_ids
    assert one.logits is not None and other.logits is not None
    for length, policy, asked in ((9, Exact(), chunks), (25, Exact(), chunks), (9, ORDER, chunks[::-1])):
        request = request_of(prompts, asked, length, policy)
        result = generate(engine, source, request)
        assert result.usage.prefilled_tokens == length
        in_order = replace(request, chunks=chunks, pieces=())
        assert_same(result, own_forward(model, in_order, result), request)
    return float((one.logits - other.logits).abs().max())


def test_turns_of_a_conversation_are_the_models_own_forward(tiny: Setup) -> None:
    conversation(*tiny, RandomPrompts(VOCAB_SIZE, seed=11), turns=5, new_tokens=7)


def test_a_question_asked_again_and_another_one(tiny: Setup) -> None:
    assert repeated_and_other_questions(*tiny, RandomPrompts(VOCAB_SIZE, seed=12)) <= 1e-4


@pytest.mark.parametrize("block_size", [8, 32])
def test_a_run_is_used_for_part_of_a_block(tiny: Setup, block_size: int) -> None:
    """Agreements of every length up to two blocks, behind a chunk that ends within one."""
    engine, model = tiny
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=13 + block_size), MemorySource()
    chunk, tail = prompts.chunk(21), prompts.ids(2 * block_size)
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    for length in (2 * block_size, 1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size - 1):
        ids = (*tail[:length], *prompts.ids(3))
        request = GenerateRequest(
            prompts.prefix, (chunk,), ids, block_size, Exact(), sampling=sampling, keep_logits=1
        )
        result = generate(engine, source, request)
        assert result.usage.continued_tokens in (0, length)
        assert_same(result, own_forward(model, request, result), request)
    assert result.usage.continued_tokens == 2 * block_size - 1


# SmolLM2


@pytest.fixture(scope="module")
def smol(smollm2: Path, smollm2_model: LoadedModel) -> Iterator[Setup]:
    own = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with Engine(smollm2_model, "float32", config(pool_bytes=600_000_000), poison=False) as engine:
        yield engine, own
        engine.check_integrity()


def test_smollm2_answers_real_questions_as_transformers_does(
    smol: Setup, smollm2: Path, real_data: Path
) -> None:
    """20 questions, one retrieved chunk each, 64 greedy tokens; all in one engine at the same time."""
    engine, model = smol
    encode = load_encoder(smollm2)
    prefix_ids = encode("<|im_start|>system\nAnswer from the document.<|im_end|>\n<|im_start|>user\n")
    prefix, source = ChunkRef("prefix", (), prefix_ids), MemorySource()
    requests = []
    with (real_data / "mtrag" / "tasks.jsonl").open(encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in lines]
    for number, task in enumerate([task for task in tasks if task["contexts"]][:20]):
        chunk = ChunkRef(f"c{number}", prefix_ids, encode(task["contexts"][0]["text"])[: 24 + 2 * number])
        tail = encode("\n\n" + task["question"] + "<|im_end|>\n<|im_start|>assistant\n")
        requests.append(
            GenerateRequest(
                prefix,
                (chunk,),
                tail,
                policy=Map(),
                sampling=Sampling(max_tokens=64, ignore_eos=True),
                keep_logits=1,
            )
        )
    chunks = [request.chunks[0] for request in requests]
    for ref, kv in zip(chunks, engine.prefill(prefix, chunks, source, block_size=16), strict=True):
        source.kept[ref.input_key] = kv
    for request, generation in [(request, engine.generate(request, source)) for request in requests]:
        result = generation.result(120)
        assert result.usage.prefilled_tokens == len(request.tail_ids)
        assert_same(result, own_forward(model, request, result), request)


def test_smollm2_exact_off_and_mapped(smol: Setup) -> None:
    engine, model = smol
    prompts, source = RandomPrompts(40_000, prefix_tokens=30, seed=9), MemorySource()
    chunks = (prompts.chunk(70), prompts.chunk(50))
    for policy, reuse in ((Exact(), "auto"), (Exact(), "off"), (Map(), "auto")):
        request = request_of(prompts, chunks, 12, policy, reuse=reuse, max_tokens=8)
        result = generate(engine, source, request)
        oracle = mapped_by_hand if policy == Map() else own_forward
        assert_same(result, oracle(model, request, result), request)


def test_smollm2_converses_and_repeats(smol: Setup) -> None:
    conversation(*smol, RandomPrompts(40_000, seed=14), turns=5, new_tokens=16)
    assert repeated_and_other_questions(*smol, RandomPrompts(40_000, seed=15)) <= TOLERANCE


def load_encoder(directory: Path) -> Callable[[str], tuple[int, ...]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
