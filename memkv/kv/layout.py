"""Where each key and value stands inside a block.

    block = [layer][ K: kv_heads, head_dim/x, block_size, x ][ V: kv_heads, head_dim, block_size ]
    x     = 16 bytes / element size

The same bytes in the pool, in host memory and in a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from memkv.errors import LayoutError

BLOCK_SIZES = (8, 16, 32)
ELEMENT_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PIECE_BYTES = 16


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a block. Raises `LayoutError` on values that no kernel can serve."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # token slots in a block
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_SIZES:
            raise LayoutError(
                f"KV dtype {self.dtype!r} is not known", hint=f"one of {', '.join(ELEMENT_SIZES)}"
            )
        if self.block_size not in BLOCK_SIZES:
            raise LayoutError(f"block size {self.block_size} is not supported", hint="8, 16 or 32")
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}", hint="at least 1")
        if self.head_dim % self.x:
            raise LayoutError(
                f"head dim {self.head_dim} is not a multiple of {self.x}, the elements in 16 bytes",
                hint="use a model with another head dim, or keep KV in kv.dtype = float32",
            )

    @property
    def element_size(self) -> int:
        return ELEMENT_SIZES[self.dtype]

    @property
    def x(self) -> int:
        """Elements in one 16-byte piece of K."""
        return _PIECE_BYTES // self.element_size

    @property
    def bytes_per_layer_k(self) -> int:
        """Bytes of one layer's K in one block; its V takes as many."""
        return self.num_kv_heads * self.head_dim * self.block_size * self.element_size

    @property
    def bytes_per_layer(self) -> int:
        return 2 * self.bytes_per_layer_k

    @property
    def bytes_per_block(self) -> int:
        return self.num_layers * self.bytes_per_layer

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_per_block // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the whole blocks that hold `num_tokens` tokens."""
        return self.blocks_for(num_tokens) * self.bytes_per_block
