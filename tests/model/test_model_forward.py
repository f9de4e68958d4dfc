"""memkv's forward pass against transformers' own, on tiny models of every supported family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, own_logits
from tiny_models import FAMILIES, VOCAB_SIZE
from torch import Tensor

from memkv.model.attention import forward
from memkv.model.loader import LoadedModel, load_model
from memkv.model.observation import rotate

# Relative to the largest logit. Rounding of float32 gives about 2e-6, and 5e-5 for keys stored far away.
IN_PLACE, RELOCATED = 2e-5, 5e-4


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def eager(loaded: LoadedModel, token_ids: list[int]) -> Tensor:
    return own_logits(loaded.module, token_ids, "eager")


def assert_close(ours: Tensor, own: Tensor, tolerance: float) -> None:
    assert ours.shape == own.shape
    assert float((ours - own).abs().max()) <= tolerance * float(own.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_and_their_next_tokens_have_their_own_logits(
    family: str, load_tiny: Callable[[str], LoadedModel]
) -> None:
    loaded = load_tiny(family)
    model = PagedModel(loaded.module, loaded.spec)
    prompts = [tokens(37, 1), tokens(5, 2), tokens(20, 3)]
    following = [tokens(1, 4), tokens(3, 5), tokens(1, 6)]
    blocks = [[9, 2, 30], [4], [17, 5]]
    first = model.step([Row(ids, 0, own) for ids, own in zip(prompts, blocks, strict=True)])
    rows = [
        Row(new, 0, own, already=len(ids)) for ids, new, own in zip(prompts, following, blocks, strict=True)
    ]
    then = model.step(rows)
    assert first is not None and then is not None
    for prompt, new, ours, more in zip(
        prompts, following, first.split([37, 5, 20]), then.split([1, 3, 1]), strict=True
    ):
        own = eager(loaded, prompt + new)
        assert_close(torch.cat((ours, more)), own, IN_PLACE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_mapped_elsewhere_gives_the_logits_of_the_whole_prompt(
    family: str, load_tiny: Callable[[str], LoadedModel]
) -> None:
    loaded = load_tiny(family)
    model = PagedModel(loaded.module, loaded.spec)
    chunk, question = tokens(27, 7), tokens(6, 8)
    own = eager(loaded, chunk + question)[27:]
    stored = 311
    model.step([Row(chunk, stored, [3, 8])], all_logits=False)
    at_start = Row(question, 27, [1], mapped=[([3, 8], 27, 0, stored)])
    further_on = Row(question, 927, [2], mapped=[([3, 8], 27, 900, stored)])
    both = model.step([at_start, further_on])
    assert both is not None
    for ours in both.split(6):
        assert_close(ours, own, RELOCATED)

    off_by_one = model.step([Row(question, 27, [1], mapped=[([3, 8], 27, 0, stored + 1)])])
    assert off_by_one is not None
    assert float((off_by_one - own).abs().max()) > 10 * RELOCATED * float(own.abs().max())


@pytest.mark.parametrize("family", ["llama", "cohere2", "phi3-partial", "gemma3", "glm"])
def test_mapped_keys_equal_keys_rotated_to_their_place(
    family: str, load_tiny: Callable[[str], LoadedModel]
) -> None:
    loaded = load_tiny(family)
    model = PagedModel(loaded.module, loaded.spec)
    chunk, question = tokens(16, 9), tokens(4, 10)
    model.step([Row(chunk, 100, [6])], all_logits=False)
    for layer, (k_cache, v_cache) in zip(loaded.spec.layers, model.caches, strict=True):
        keys = k_cache[6].permute(0, 2, 1, 3).flatten(-2)  # [kv_heads, block_size, head_dim]
        if layer.rope is not None:
            keys = rotate(keys.double(), torch.full((16,), 40 - 100), layer.rope).float()
        k_cache[7] = keys.unflatten(-1, (-1, k_cache.shape[-1])).permute(0, 2, 1, 3)
        v_cache[7] = v_cache[6]
    mapped = model.step([Row(question, 56, [1], mapped=[([6], 16, 40, 100)])])
    rotated = model.step([Row(question, 56, [2], mapped=[([7], 16, 40, 40)])])
    assert mapped is not None and rotated is not None
    assert_close(mapped, rotated, IN_PLACE)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere", "nemotron"])
def test_logits_of_chosen_rows_only(family: str, load_tiny: Callable[[str], LoadedModel]) -> None:
    loaded = load_tiny(family)
    model = PagedModel(loaded.module, loaded.spec)
    rows = [Row(tokens(9, 11), 0, [0]), Row(tokens(4, 12), 0, [1])]
    everything = model.step(rows)
    chosen = model.step(rows, torch.tensor([8, 12]))
    assert everything is not None and chosen is not None
    torch.testing.assert_close(chosen, everything[[8, 12]], rtol=1e-5, atol=1e-6)


def test_without_rows_the_head_is_not_run(load_tiny: Callable[[str], LoadedModel]) -> None:
    loaded = load_tiny("llama")
    model = PagedModel(loaded.module, loaded.spec)
    heads_run = 0

    def count(*_: object) -> None:
        nonlocal heads_run
        heads_run += 1

    handle = loaded.module.lm_head.register_forward_hook(count)
    try:
        assert model.step([Row(tokens(9, 13), 0, [0])], all_logits=False) is None
        assert heads_run == 0
        assert not model.caches[-1][0][0, :, :, :9].isnan().any()
        model.step([Row(tokens(9, 13), 0, [0])])
        assert heads_run == 1
    finally:
        handle.remove()


def test_positions_past_the_context_rotate_like_any_other(load_tiny: Callable[[str], LoadedModel]) -> None:
    loaded = load_tiny("llama")
    model = PagedModel(loaded.module, loaded.spec)
    ids = tokens(12, 14)
    near = model.step([Row(ids, 0, [0])])
    far = model.step([Row(ids, 3 * loaded.spec.max_context, [1])])
    assert near is not None and far is not None
    assert_close(far, near, 5e-3)


def test_block_mass_and_lse_of_the_layers_asked_for(load_tiny: Callable[[str], LoadedModel]) -> None:
    loaded = load_tiny("llama")
    model = PagedModel(loaded.module, loaded.spec)
    rows = [Row(tokens(20, 15), 0, [0, 1]), Row(tokens(3, 16), 0, [2])]
    context = model.context(rows, block_mass_layers=frozenset({1, 3}), lse_layers=frozenset({2}))
    ids = torch.tensor(rows[0].token_ids + rows[1].token_ids)
    positions = torch.tensor(rows[0].positions() + rows[1].positions())
    assert forward(loaded.module, ids, positions, context, None) is None
    assert set(context.block_mass) == {1, 3} and set(context.lse) == {2}
    assert context.lse[2].shape == (23, loaded.spec.num_heads)
    mass = context.block_mass[3]
    assert mass.shape == (loaded.spec.num_heads, 3)
    per_sequence = torch.stack((mass[:, :2].sum(1), mass[:, 2]), dim=1)
    torch.testing.assert_close(per_sequence, torch.tensor([[20.0, 3.0]]).expand_as(per_sequence))


def test_bfloat16_stays_near_float32(
    load_tiny: Callable[[str], LoadedModel], tiny_model_dir: Callable[[str], Path]
) -> None:
    loaded = load_model(str(tiny_model_dir("qwen3")), dtype="bfloat16")
    model = PagedModel(loaded.module, loaded.spec)
    ids = tokens(30, 17)
    ours = model.step([Row(ids, 0, [0, 1])])
    assert ours is not None and ours.dtype == torch.bfloat16
    own = eager(load_tiny("qwen3"), ids)
    assert_close(ours.float(), own, 0.1)
    assert loaded.spec == load_tiny("qwen3").spec
