"""KVCache: bytes in, typed views, bytes out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from memkv.engine.kv_cache import KVCache
from memkv.errors import ModelError
from memkv.kernels import ops
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def layout_of(dtype: str = "float32", block_size: int = 16) -> KVLayout:
    return KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=block_size, dtype=dtype)


def random_chunk(layout: KVLayout, num_tokens: int) -> ChunkKV:
    data = np.random.default_rng(1).integers(0, 100, layout.bytes_for(num_tokens), dtype=np.uint8)
    return ChunkKV(layout, num_tokens, data.tobytes())


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_written_token_is_where_the_layout_says(dtype: str, block_size: int) -> None:
    layout = layout_of(dtype, block_size)
    cache = KVCache(layout, 7, poison=True)
    blocks, num_tokens = [5, 0, 3], 2 * block_size + 3
    slots = torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(num_tokens)])
    written = {}
    for layer in range(layout.num_layers):
        k = torch.randn(num_tokens, layout.num_kv_heads, layout.head_dim)
        v = torch.randn(num_tokens, layout.num_kv_heads, layout.head_dim)
        ops.write_kv(k, v, *cache.layer(layer), slots)
        written[layer] = (k.to(TYPES[dtype]), v.to(TYPES[dtype]))
    chunk = cache.export_chunk(blocks, num_tokens)
    heads, dim, x = layout.num_kv_heads, layout.head_dim, layout.x
    for index in range(chunk.num_blocks):
        block = torch.frombuffer(bytearray(chunk.block(index)), dtype=TYPES[dtype])
        for layer in range(layout.num_layers):
            per_k = heads * dim * block_size
            own = block[2 * layer * per_k : 2 * (layer + 1) * per_k]
            k = own[:per_k].reshape(heads, dim // x, block_size, x)
            v = own[per_k:].reshape(heads, dim, block_size)
            for slot in range(block_size):
                token = index * block_size + slot
                if token < num_tokens:
                    assert torch.equal(k[:, :, slot].reshape(heads, dim), written[layer][0][token])
                    assert torch.equal(v[:, :, slot], written[layer][1][token])
                else:  # was NaN
                    assert not k[:, :, slot].any() and not v[:, :, slot].any()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, "read-only"])
def test_a_chunk_comes_out_as_it_went_in(kind: object) -> None:
    layout = layout_of("bfloat16")
    chunk = random_chunk(layout, 48)
    data = memoryview(chunk.data).toreadonly() if kind == "read-only" else kind(chunk.data)  # type: ignore[operator]
    cache = KVCache(layout, 9)
    cache.import_chunk(ChunkKV(layout, 48, data), [8, 1, 4])
    assert bytes(cache.export_chunk([8, 1, 4], 48).data) == chunk.data
    other = KVCache(layout, 3)
    other.import_chunk(cache.export_chunk([8, 1, 4], 48), [2, 0, 1])
    assert bytes(other.export_chunk([2, 0, 1], 48).data) == chunk.data


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
        ),
    ],
)
def test_a_staged_chunk_comes_out_as_it_went_in(device: str) -> None:
    layout = layout_of("bfloat16")
    chunk = random_chunk(layout, 40)
    cache = KVCache(layout, 9, device)
    staged = cache.staged(chunk)
    assert (staged is chunk) == (device == "cpu")
    assert torch.from_numpy(staged.rows()).is_pinned() == (device == "cuda")
    watch = cache.import_chunk(staged, [8, 1, 4])
    watch.wait()
    found = cache.export_chunk([8, 1, 4], 48)
    assert bytes(found.data) == chunk.data


def test_only_the_last_block_is_zeroed_and_only_in_the_copy() -> None:
    layout = layout_of()
    chunk = random_chunk(layout, 32)
    cache = KVCache(layout, 2)
    cache.import_chunk(chunk, [0, 1])
    short = cache.export_chunk([0, 1], 17)
    assert bytes(short.block(0)) == bytes(chunk.block(0))
    assert np.count_nonzero(np.frombuffer(short.block(1), np.uint8)) < layout.bytes_per_block / 8
    assert bytes(cache.export_chunk([0, 1], 32).data) == chunk.data


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_leave_the_cache(value: float) -> None:
    cache = KVCache(layout_of("bfloat16"), 2)
    cache.import_chunk(random_chunk(layout_of("bfloat16"), 32), [0, 1])
    v_cache = cache.layer(2)[1]
    v_cache[1, 1, 7, 9] = value
    with pytest.raises(ModelError, match="finite"):
        cache.export_chunk([0, 1], 32)
    assert cache.export_chunk([0, 1], 25).num_tokens == 25  # slot 9 of the second block is not part of it


def test_an_exported_chunk_cannot_be_changed() -> None:
    cache = KVCache(layout_of(), 1)
    cache.import_chunk(random_chunk(layout_of(), 16), [0])
    with pytest.raises(TypeError):
        cache.export_chunk([0], 16).block(0)[0] = 1


def test_a_large_pool_takes_memory_only_where_it_is_written() -> None:
    def resident() -> int:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * 4096

    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    before = resident()
    cache = KVCache(layout, 2_000_000_000 // layout.bytes_per_block)
    cache.clear([1, 2, 3])
    assert resident() - before < 50_000_000
    cache.import_chunk(ChunkKV(layout, 16, bytes(layout.bytes_per_block)), [cache.num_blocks - 1])
    assert resident() - before < 50_000_000


def test_poison_covers_the_pool_and_what_is_cleared() -> None:
    cache = KVCache(layout_of(), 3, poison=True)
    assert all(bool(view.isnan().all()) for layer in range(3) for view in cache.layer(layer))
    cache.import_chunk(random_chunk(layout_of(), 48), [0, 1, 2])
    cache.clear([1])
    nan_blocks = cache.layer(1)[0].isnan().flatten(1).all(dim=1)
    assert nan_blocks.tolist() == [False, True, False]


def test_chunks_that_are_exported_together_are_those_that_are_exported_alone() -> None:
    layout = layout_of()
    cache = KVCache(layout, 12, poison=True)
    chunk = random_chunk(layout, 5 * 16)
    cache.import_chunk(chunk, [9, 2, 5, 0, 7])
    wanted = [([9, 2], 20), ([5], 16), ([0, 7], 31)]
    export = cache.export_chunks(wanted)
    for index, (blocks, num_tokens) in enumerate(wanted):
        assert bytes(export.chunk(index).data) == bytes(cache.export_chunk(blocks, num_tokens).data)


def test_of_chunks_that_are_exported_together_only_those_that_are_not_finite_fail() -> None:
    layout = layout_of()
    cache = KVCache(layout, 6, poison=True)
    cache.import_chunk(random_chunk(layout, 3 * 16), [0, 1, 2])
    export = cache.export_chunks([([0], 16), ([4], 16), ([1, 2], 30)])
    assert export.chunk(0).num_tokens == 16 and export.chunk(2).num_tokens == 30
    with pytest.raises(ModelError, match="not finite"):
        export.chunk(1)
