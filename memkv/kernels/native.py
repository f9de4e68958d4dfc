"""The compiled extension, or a clear error where it was never built; tensors as it takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from memkv.errors import ExtensionMissing

try:
    from memkv import _kernels as _kernels
except ImportError as error:
    _kernels = None  # type: ignore[assignment]
    _why = str(error)

# csrc/include/memkv/attention_args.h: DType
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CPU_DTYPES = (torch.float32, torch.bfloat16)


def require_extension() -> None:
    """Raises ExtensionMissing unless `memkv._kernels` can be called."""
    if _kernels is None:
        raise ExtensionMissing(
            f"the compiled CPU kernels cannot be imported: {_why}",
            hint="build them in the checkout: pip install --no-build-isolation -e .",
        )


def cache_of(k_cache: Tensor, v_cache: Tensor) -> _kernels.PagedCache:
    """One layer of the pool; shapes, dtypes and strides were checked."""
    num_blocks, kv_heads, pieces, block_size, x = k_cache.shape
    return _kernels.paged_cache(
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.stride(0),
        v_cache.stride(0),
        num_blocks,
        kv_heads,
        pieces * x,
        block_size,
        DTYPES[k_cache.dtype],
    )


def rows_of(tensor: Tensor) -> _kernels.HeadRows:
    """[num_tokens, heads, head_dim], of one of DTYPES, its last dimension contiguous."""
    return _kernels.head_rows(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), DTYPES[tensor.dtype])
