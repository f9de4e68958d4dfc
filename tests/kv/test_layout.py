"""KVLayout: the arithmetic agrees with an array of that shape, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv.errors import LayoutError
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import BLOCK_SIZES, ELEMENT_SIZES, KVLayout

layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 5),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 16, 24, 64, 80]),
    block_size=st.sampled_from(BLOCK_SIZES),
    dtype=st.sampled_from(sorted(ELEMENT_SIZES)),
)


@given(layouts)
def test_bytes_are_those_of_the_drawn_block(layout: KVLayout) -> None:
    element = {2: np.uint16, 4: np.uint32}[layout.element_size]
    k = np.zeros((layout.num_kv_heads, layout.head_dim // layout.x, layout.block_size, layout.x), element)
    v = np.zeros((layout.num_kv_heads, layout.head_dim, layout.block_size), element)
    assert layout.x * layout.element_size == 16
    assert layout.bytes_per_layer_k == k.nbytes == v.nbytes
    assert layout.bytes_per_layer == k.nbytes + v.nbytes
    assert layout.bytes_per_block == layout.num_layers * layout.bytes_per_layer
    assert layout.bytes_per_token * layout.block_size == layout.bytes_per_block


@given(layouts, st.integers(0, 500))
def test_blocks_hold_the_tokens_and_no_block_is_spare(layout: KVLayout, num_tokens: int) -> None:
    blocks = layout.blocks_for(num_tokens)
    assert blocks * layout.block_size >= num_tokens > (blocks - 1) * layout.block_size
    assert layout.bytes_for(num_tokens) == blocks * layout.bytes_per_block


def test_smollm2_in_half_precision_takes_23040_bytes_a_token() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    assert layout.bytes_per_token == 23_040


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int8"},
        {"block_size": 0},
        {"block_size": 12},
        {"block_size": 64},
        {"num_layers": 0},
        {"num_kv_heads": -1},
        {"head_dim": 0},
        {"head_dim": 20},  # 16 bytes are 8 elements
        {"dtype": "float32", "head_dim": 6},
    ],
)
def test_what_no_kernel_serves_is_refused(change: dict[str, object]) -> None:
    good: dict[str, object] = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
        "block_size": 16,
        "dtype": "bfloat16",
    }
    KVLayout(**good)  # type: ignore[arg-type]
    with pytest.raises(LayoutError):
        KVLayout(**{**good, **change})  # type: ignore[arg-type]


def test_a_chunk_gives_its_blocks_without_a_copy() -> None:
    layout = KVLayout(1, 1, 8, 8, "float32")
    data = bytearray(layout.bytes_for(20))
    chunk = ChunkKV(layout, 20, data)
    data[layout.bytes_per_block] = 7
    assert chunk.num_blocks == 3
    assert [len(chunk.block(i)) for i in range(3)] == [layout.bytes_per_block] * 3
    assert chunk.block(1)[0] == 7
    with pytest.raises(AssertionError, match="disagree"):
        ChunkKV(layout, 25, data)
