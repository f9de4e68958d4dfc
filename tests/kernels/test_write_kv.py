"""write_kv puts each element where the layout says, and refuses before it writes."""

from __future__ import annotations

import pytest
import torch
from paged_problem import Spec, fill, poisoned_pool
from torch import Tensor

from memkv.errors import KernelArgumentError
from memkv.kernels import ops, reference

RUNS = pytest.mark.parametrize("run", [ops, reference], ids=["compiled", "reference"])


def slots_of(blocks: list[int], num_tokens: int, block_size: int) -> Tensor:
    return torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(num_tokens)])


@RUNS
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_element_lands_in_its_place(
    run: type[ops], block_size: int, source: torch.dtype, dtype: torch.dtype
) -> None:
    spec = Spec([], dtype=dtype, block_size=block_size, kv_heads=3, head_dim=24)
    k, v = torch.randn(2, 75, 3, 24).to(source).unbind()
    blocks = [7, 0, 9, 3, 5, 8, 2, 1, 6, 4]
    k_cache, v_cache = poisoned_pool(spec, 10)
    run.write_kv(k, v, k_cache, v_cache, slots_of(blocks, 75, block_size))
    k_expected, v_expected = poisoned_pool(spec, 10)
    fill(k_expected, v_expected, blocks, k.float().to(dtype), v.float().to(dtype))
    # equal_nan: what was not written is still NaN
    torch.testing.assert_close(k_cache, k_expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache, v_expected, rtol=0, atol=0, equal_nan=True)


@RUNS
def test_rounding_to_bfloat16_is_pytorchs(run: type[ops]) -> None:
    special = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, torch.inf, -torch.inf, torch.nan, 1e-40, 2**-133]
    k = torch.tensor(special + [float(i) * 1.001 for i in range(6)]).view(1, 1, 16)
    k_cache, v_cache = poisoned_pool(Spec([], dtype=torch.bfloat16, kv_heads=1, head_dim=16), 1)
    run.write_kv(k, k, k_cache, v_cache, torch.tensor([5]))
    expected = k.view(16).to(torch.bfloat16)
    torch.testing.assert_close(k_cache[0, 0, :, 5, :].flatten(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache[0, 0, :, 5], expected, rtol=0, atol=0, equal_nan=True)


@RUNS
def test_strided_rows_and_no_rows(run: type[ops]) -> None:
    spec = Spec([], kv_heads=2, head_dim=16)
    k, v = (
        torch.randn(2, 2, 20, 16).transpose(1, 2).unbind()
    )  # heads outermost, as attention modules have them
    assert not k.is_contiguous()
    k_cache, v_cache = poisoned_pool(spec, 2)
    run.write_kv(k, v, k_cache, v_cache, torch.arange(20))
    run.write_kv(k[:0], v[:0], k_cache, v_cache, torch.arange(0))
    k_expected, v_expected = poisoned_pool(spec, 2)
    fill(k_expected, v_expected, [0, 1], k, v)
    torch.testing.assert_close(k_cache, k_expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache, v_expected, rtol=0, atol=0, equal_nan=True)


@RUNS
@pytest.mark.parametrize("slot", [-1, 32, 2**40])
def test_a_slot_outside_the_pool_writes_nothing(run: type[ops], slot: int) -> None:
    k_cache, v_cache = poisoned_pool(Spec([], kv_heads=1, head_dim=16), 2)
    k = torch.ones(2, 1, 16)
    with pytest.raises(KernelArgumentError, match="outside"):
        run.write_kv(k, k, k_cache, v_cache, torch.tensor([0, slot]))
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


def test_arguments_that_do_not_fit_are_named() -> None:
    k_cache, v_cache = poisoned_pool(Spec([], kv_heads=2, head_dim=16), 2)
    k, slots = torch.ones(3, 2, 16), torch.arange(3)
    for bad, words in (
        ((k[:2], k, k_cache, v_cache, slots), r"k is \[2, 2, 16\]"),
        ((k, k[:, :1], k_cache, v_cache, slots), r"v is \[3, 1, 16\]"),
        ((k, k, k_cache, v_cache, slots.int()), "slots are torch.int32"),
        ((k, k, k_cache, v_cache[:, :1], slots), "are not"),
        ((k, k, k_cache[0], v_cache, slots), "not 5-D and 4-D"),
        ((k, k, k_cache.half(), v_cache.half(), slots), "are not"),
        ((k, k, k_cache.transpose(2, 3).contiguous().transpose(2, 3), v_cache, slots), "contiguous within"),
    ):
        with pytest.raises(KernelArgumentError, match=words):
            ops.write_kv(*bad)
