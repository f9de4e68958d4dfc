"""A chunk's keys and values on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memkv.kv.layout import KVLayout


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """`data` holds `layout.blocks_for(num_tokens)` whole blocks in `KVLayout` order.

    Slots past `num_tokens` are zero.
    """

    layout: KVLayout
    num_tokens: int
    data: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        assert len(self.data) == self.layout.bytes_for(self.num_tokens), "bug: bytes and tokens disagree"

    @property
    def num_blocks(self) -> int:
        return self.layout.blocks_for(self.num_tokens)

    def rows(self) -> NDArray[np.uint8]:
        """[num_blocks, bytes_per_block], without a copy."""
        return np.frombuffer(self.data, dtype=np.uint8).reshape(self.num_blocks, -1)

    def block(self, index: int) -> memoryview:
        """The bytes of one block, without a copy."""
        size = self.layout.bytes_per_block
        return memoryview(self.data)[index * size : (index + 1) * size]
