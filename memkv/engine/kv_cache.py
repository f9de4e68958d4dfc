"""The device tensor that blocks index into.

    storage  [num_blocks, bytes_per_block] uint8
    block    [layer][ K: kv_heads, head_dim/x, block_size, x ][ V: kv_heads, head_dim, block_size ]

One row is one block in `KVLayout` order, so that a chunk goes in and out as whole rows. Layers see typed,
strided views of the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from memkv.engine.block_copy import copy_blocks
from memkv.errors import ModelError
from memkv.kernels.ops import prefer_huge_pages
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVCache:
    """`num_blocks` blocks on a device. On a CPU the system backs a row with memory when it is first written.

    Args:
        poison: for tests; fills what is not written with NaN, so that a read of it shows in every result.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        poison: bool = False,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._poison = poison
        self._storage = torch.empty((num_blocks, layout.bytes_per_block), dtype=torch.uint8, device=device)
        if self.device.type == "cpu":
            prefer_huge_pages(self._storage)
        self._typed = self._storage.view(_DTYPES[layout.dtype])  # [num_blocks, elements of a block]
        self._layers = [self._layer(index) for index in range(layout.num_layers)]
        self.clear(range(num_blocks))

    @property
    def device(self) -> torch.device:
        return self._storage.device

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """One layer's caches, views without a copy.

        Returns:
            k_cache: [num_blocks, kv_heads, head_dim / x, block_size, x]
            v_cache: [num_blocks, kv_heads, head_dim, block_size]
        """
        return self._layers[index]

    def clear(self, blocks: Sequence[int]) -> None:
        """Says that nothing in these blocks is written any more. Costs nothing unless poisoned."""
        if self._poison and len(blocks):
            self._typed[torch.as_tensor(blocks, device=self.device)] = torch.nan

    def import_chunk(self, kv: ChunkKV, blocks: Sequence[int]) -> None:
        """Copies a chunk into blocks, in order; one copy, whatever kind of buffer holds it."""
        assert kv.layout == self.layout, "bug: a chunk of another layout"
        assert len(blocks) == kv.num_blocks, "bug: blocks and chunk disagree"
        if not blocks:
            return
        rows = kv.rows()
        if self.device.type == "cpu":
            self._storage.numpy()[list(blocks)] = rows
            return
        staged = torch.empty(
            rows.shape, dtype=torch.uint8, pin_memory=True
        )  # kept by torch until it is copied
        staged.numpy()[:] = rows
        self.import_blocks(staged, range(len(blocks)), blocks)

    def import_blocks(self, source: Tensor, source_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies rows of host memory [n, bytes_per_block] into blocks; a GPU's copy is not waited for."""
        copy_blocks(source, source_ids, self._storage, blocks)

    def export_chunk(self, blocks: Sequence[int], num_tokens: int) -> ChunkKV:
        """The chunk that these blocks hold, in host memory; slots past `num_tokens` are zero.

        Raises:
            ModelError: a key or value is not finite.
        """
        assert len(blocks) == self.layout.blocks_for(num_tokens), "bug: blocks and tokens disagree"
        rows = self._storage[torch.as_tensor(blocks, dtype=torch.int64, device=self.device)].cpu()
        typed = rows.view(self._typed.dtype)
        unused = len(blocks) * self.layout.block_size - num_tokens
        if unused:
            for k, v in (self._views(typed[-1:], layer) for layer in range(self.layout.num_layers)):
                k[:, :, :, -unused:] = 0
                v[:, :, :, -unused:] = 0
        if not bool(torch.isfinite(typed).all()):
            raise ModelError(
                "the model produced keys or values that are not finite numbers",
                hint="load the weights in a wider dtype, or check them with `memkv models list`",
            )
        data: np.ndarray[tuple[int], np.dtype[np.uint8]] = rows.reshape(-1).numpy()
        return ChunkKV(self.layout, num_tokens, data.data.toreadonly())

    def _layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._views(self._typed, index)

    def _views(self, typed: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer in rows of typed elements [rows, elements of a block]."""
        layout = self.layout
        rows, elements = typed.shape
        per_k = layout.bytes_per_layer_k // layout.element_size
        start = typed.storage_offset() + layer * 2 * per_k
        heads, dim, size, x = layout.num_kv_heads, layout.head_dim, layout.block_size, layout.x
        k = typed.as_strided((rows, heads, dim // x, size, x), (elements, dim * size, size * x, x, 1), start)
        v = typed.as_strided((rows, heads, dim, size), (elements, dim * size, size, 1), start + per_k)
        return k, v
