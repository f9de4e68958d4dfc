"""What a look sees is the model's own attention over the mapped prompt, by transformers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from engine_harness import MemorySource, RandomPrompts, config
from test_exactness import assert_same, mapped_cache, own_forward
from tiny_models import VOCAB_SIZE, tiny_model

from memkv.engine.engine import Engine
from memkv.engine.request import GenerateRequest
from memkv.engine.reuse import BlockMass, LookRequest, MappedChunk, ReusePolicy, Select
from memkv.engine.sampler import Sampling
from memkv.model.loader import LoadedModel

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
SIZE = 16


@dataclass(frozen=True)
class Records(ReusePolicy):
    wanted: LookRequest
    seen: list[BlockMass] = field(default_factory=list)
    name: str = "records"

    @property
    def look(self) -> LookRequest:
        return self.wanted

    def max_fresh_blocks(self, mapped: Sequence[MappedChunk]) -> int:
        return 1

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        assert look is not None
        self.seen.append(look)
        return [[] for _ in mapped]


@torch.inference_mode()
def mass_by_hand(family: str, request: GenerateRequest) -> list[list[float]]:
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    cache, start = mapped_cache(model, request)
    ids = torch.tensor([request.tail_ids])
    positions = torch.arange(start, start + ids.shape[1])[None]
    attentions = model(ids, position_ids=positions, past_key_values=cache, output_attentions=True).attentions
    look = request.policy.look
    assert look is not None
    layers = look.layer_indices(len(attentions))
    rows = ids.shape[1] - (look.rows or ids.shape[1])
    of_keys = sum(attentions[layer][0, :, rows:].sum(dim=(0, 1)) for layer in layers)  # [keys]
    assert isinstance(of_keys, torch.Tensor)
    found, first = [], request.prefix.num_tokens
    for chunk in request.chunks:
        own = of_keys[first : first + chunk.num_tokens]
        found.append([float(own[block : block + SIZE].sum()) for block in range(0, chunk.num_tokens, SIZE)])
        first += chunk.num_tokens
    return found


@pytest.mark.parametrize("family", ["llama", "smollm3"])
@pytest.mark.parametrize("look", [LookRequest(), LookRequest((0.5, 1.0), 3), LookRequest((0.0, 0.5))])
@pytest.mark.parametrize("max_batch_tokens", [4096, 5])
def test_a_look_is_the_models_attention(
    load_tiny: Callable[[str], LoadedModel], family: str, look: LookRequest, max_batch_tokens: int
) -> None:
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=3), MemorySource()
    chunks = tuple(prompts.chunk(size) for size in (45, 16, 33))
    policy = Records(look)
    request = GenerateRequest(prompts.prefix, chunks, prompts.ids(9), SIZE, policy)
    values = config(max_batch_tokens=max_batch_tokens)
    with Engine(load_tiny(family), "float32", values, poison=True) as engine:
        engine.generate(request, source).result(60)
    (seen,) = policy.seen
    expected = mass_by_hand(family, request)
    assert [len(each) for each in seen] == [3, 1, 3]
    for one, other in zip(seen, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_all_blocks_chosen_is_the_models_own_forward(load_tiny: Callable[[str], LoadedModel]) -> None:
    """With everything computed afresh nothing of the look is left; beside it others answer."""
    prompts, source = RandomPrompts(VOCAB_SIZE, seed=4), MemorySource()
    chunks = tuple(prompts.chunk(30 + index) for index in range(4))
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    requests = [
        GenerateRequest(
            prompts.prefix, chunks, prompts.ids(9), policy=Select(r), sampling=sampling, keep_logits=9
        )
        for r in (1.0, 0.4, 1.0)
    ]
    model = tiny_model("llama")
    with Engine(load_tiny("llama"), "float32", config(), poison=True) as engine:
        generations = [engine.generate(request, source) for request in requests]
        for request, generation in zip(requests, generations, strict=True):
            result = generation.result(60)
            assert result.usage.looked_tokens == 9
            if request.policy == Select(1.0):
                assert_same(result, own_forward(model, request, result), request)
        engine.check_integrity()
