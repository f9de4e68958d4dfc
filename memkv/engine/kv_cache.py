"""The device tensor that blocks index into.

    storage  [num_blocks, bytes_per_block] uint8
    block    [layer][ K: kv_heads, head_dim/x, block_size, x ][ V: kv_heads, head_dim, block_size ]

One row is one block in `KVLayout` order, so that a chunk goes in and out as whole rows. Layers see typed,
strided views of the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memkv.engine.block_copy import copy_blocks
from memkv.engine.staging import to_device, to_host
from memkv.engine.stopwatch import Stopwatch
from memkv.errors import ModelError
from memkv.kernels.ops import prefer_huge_pages
from memkv.kv.chunk import ChunkKV
from memkv.kv.layout import KVLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """Chunks on their way to host memory.

    Attributes:
        rows: [num_blocks, bytes_per_block] uint8.
        finite: [num_blocks] bool.
        chunks: (first row, (blocks, num_tokens)) of each.
    """

    layout: KVLayout
    rows: Tensor
    finite: Tensor
    chunks: list[tuple[int, tuple[Sequence[int], int]]]
    watch: Stopwatch

    @property
    def is_over(self) -> bool:
        return self.watch.is_over

    def chunk(self, index: int) -> ChunkKV:
        """Waits for all of them. Raises `ModelError` where one of this one's keys or values is not finite."""
        self.watch.seconds()
        first, (blocks, num_tokens) = self.chunks[index]
        last = first + len(blocks)
        if not bool(self.finite[first:last].all()):
            raise ModelError(
                "the model produced keys or values that are not finite numbers",
                hint="load the weights in a wider dtype, or check them with `memkv models list`",
            )
        data: np.ndarray[tuple[int], np.dtype[np.uint8]] = self.rows[first:last].reshape(-1).numpy()
        return ChunkKV(self.layout, num_tokens, data.data.toreadonly())


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
        self._copies: Any = None  # a stream
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

    def staged(self, kv: ChunkKV) -> ChunkKV:
        """A chunk in memory that the device copies from by itself; on a CPU, as it is. From any thread.

        The host copies all of it: not for the engine's thread, which would make no step meanwhile.
        """
        if self.device.type == "cpu":
            return kv
        memory = torch.empty(len(kv.data), dtype=torch.uint8, pin_memory=True).numpy()
        memory[:] = kv.rows().reshape(-1)
        return ChunkKV(kv.layout, kv.num_tokens, memory.data)

    def import_chunk(self, kv: ChunkKV, blocks: Sequence[int]) -> Stopwatch:
        """Copies a chunk into blocks, in order, whatever kind of buffer holds it; as `import_blocks`.

        A GPU copies from what `staged` gave as from any source; another chunk is staged here.
        """
        assert kv.layout == self.layout, "bug: a chunk of another layout"
        assert len(blocks) == kv.num_blocks, "bug: blocks and chunk disagree"
        rows = kv.rows()
        if self.device.type == "cpu":
            watch = Stopwatch(self.device)
            self._storage.numpy()[list(blocks)] = rows
            watch.stop()
            return watch
        source = torch.from_numpy(rows) if rows.flags.writeable else None
        if source is None or not source.is_pinned():
            source = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)  # kept by torch until copied
            source.numpy()[:] = rows
        return self.import_blocks(source, range(len(blocks)), blocks)

    def import_blocks(self, source: Tensor, source_ids: Sequence[int], blocks: Sequence[int]) -> Stopwatch:
        """Copies rows of host memory [n, bytes_per_block] into blocks.

        A GPU copies beside what it computes, when it has done what it was given before. Until the watch is
        over the source has to stay as it is, and nothing that is submitted may use the blocks.
        """
        with self._beside():
            watch = Stopwatch(self.device)
            copy_blocks(source, source_ids, self._storage, blocks)
            watch.stop()
        return watch

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU, in a stream of its own, which starts behind all that was submitted so far."""
        if self.device.type == "cpu":
            yield
            return
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            yield

    def export_chunk(self, blocks: Sequence[int], num_tokens: int) -> ChunkKV:
        """The chunk that these blocks hold, in host memory; slots past `num_tokens` are zero.

        Raises:
            ModelError: a key or value is not finite.
        """
        return self.export_chunks([(blocks, num_tokens)]).chunk(0)

    def export_chunks(self, chunks: Sequence[tuple[Sequence[int], int]]) -> Export:
        """Copies chunks, (blocks, num_tokens) each, to host memory; a GPU's copy is not waited for."""
        for blocks, num_tokens in chunks:
            assert len(blocks) == self.layout.blocks_for(num_tokens), "bug: blocks and tokens disagree"
        ends = list(itertools.accumulate(len(blocks) for blocks, _ in chunks))
        ids = np.fromiter(itertools.chain.from_iterable(blocks for blocks, _ in chunks), np.int64, ends[-1])
        watch = Stopwatch(self.device)
        (index,) = to_device([ids], self.device)
        rows = self._storage[index]
        typed = rows.view(self._typed.dtype)
        for end, (blocks, num_tokens) in zip(ends, chunks, strict=True):
            unused = len(blocks) * self.layout.block_size - num_tokens
            if unused:
                for slots_last in self._parts(typed[end - 1]):
                    slots_last[..., -unused:] = 0
        finite = torch.isfinite(typed).all(dim=1)
        rows, finite = to_host(rows), to_host(finite)
        watch.stop()
        return Export(self.layout, rows, finite, list(zip([0, *ends], chunks, strict=False)), watch)

    def _parts(self, typed: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of all layers of one row [elements of a block], both with slots as the last dimension.

        Returns:
            [layers, kv_heads, head_dim / x, x, block_size] and [layers, kv_heads, head_dim, block_size].
        """
        layout = self.layout
        heads, dim, size, x = layout.num_kv_heads, layout.head_dim, layout.block_size, layout.x
        per_k, start = heads * dim * size, typed.storage_offset()
        k_strides, v_strides = (2 * per_k, dim * size, size * x, 1, x), (2 * per_k, dim * size, size, 1)
        k = typed.as_strided((layout.num_layers, heads, dim // x, x, size), k_strides, start)
        v = typed.as_strided((layout.num_layers, heads, dim, size), v_strides, start + per_k)
        return k, v

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
