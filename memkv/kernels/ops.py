"""The kernels' typed face: shapes are checked here, pointers go to C++; other devices take the reference.

    k_cache  [num_blocks, kv_heads, head_dim / x, block_size, x]      x = 16 bytes / element
    v_cache  [num_blocks, kv_heads, head_dim, block_size]

Both are views of one layer of the block pool: only the stride between blocks is free.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from memkv.errors import ExtensionMissing, KernelArgumentError
from memkv.kernels import reference
from memkv.kernels.plan import AttentionPlan, AttentionResult, Rotation

try:
    from memkv import _kernels
except ImportError as error:  # a source tree that was never built
    _kernels = None  # type: ignore[assignment]
    _import_error = str(error)

__all__ = [
    "AttentionPlan",
    "AttentionResult",
    "Rotation",
    "num_threads",
    "paged_attention",
    "set_num_threads",
    "write_kv",
]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Put keys and values of new tokens into their slots, converted to the cache's dtype.

    Args:
        k, v: [num_tokens, kv_heads, head_dim], any float dtype.
        k_cache, v_cache: see the module's docstring.
        slots: int64 [num_tokens], block * block_size + offset.

    Raises:
        KernelArgumentError: shapes or dtypes do not fit, or a slot is outside the pool; nothing was written.
        ExtensionMissing: CPU tensors, but the extension was not built.
    """
    if k_cache.device.type != "cpu":
        reference.write_kv(k, v, k_cache, v_cache, slots)
        return
    _, kv_heads, head_dim, _ = _cache_shape(k_cache, v_cache)
    expected = (slots.numel(), kv_heads, head_dim)
    if k.shape != expected or v.shape != expected:
        raise KernelArgumentError(
            f"k is {list(k.shape)} and v {list(v.shape)}, not [num_tokens, kv_heads, head_dim] = {list(expected)}"
        )
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise KernelArgumentError(
            f"slots are {slots.dtype} {list(slots.shape)}, not contiguous int64 [num_tokens]"
        )
    k, v = _rows(k), _rows(v)
    if k.dtype != v.dtype:
        k, v = k.float(), v.float()
    native = _native()
    try:
        native.write_kv(
            _native_cache(k_cache, v_cache), _native_rows(k), _native_rows(v), slots.data_ptr(), slots.numel()
        )
    except ValueError as error:
        raise KernelArgumentError(str(error)) from None


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    rotation: Rotation | None,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    lse: bool = False,
    block_mass: bool = False,
) -> AttentionResult:
    """Attention of each query row over its sequence's segments, keys rotated to where they are mapped.

    Args:
        q: [num_tokens, num_heads, head_dim], float32 or bfloat16, rotated to its absolute position by the model.
        k_cache, v_cache: see the module's docstring.
        plan: validated once for this pool, on first use.
        rotation: the layer's RoPE; None for a layer without.
        scale: multiplies every score.
        window: a query sees keys at positions in (its own - window, its own]; 0 sees all up to its own.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        lse, block_mass: also return them.

    Raises:
        KernelArgumentError: shapes, dtypes or devices do not fit, or the plan does not fit the pool.
        ExtensionMissing: CPU tensors, but the extension was not built.
    """
    num_blocks, kv_heads, head_dim, block_size = _cache_shape(k_cache, v_cache)
    num_tokens, num_heads = q.shape[0], q.shape[1] if q.dim() == 3 else 0
    if q.shape != (plan.num_tokens, num_heads, head_dim) or num_heads == 0 or num_heads % kv_heads:
        raise KernelArgumentError(
            f"q is {list(q.shape)}, not [{plan.num_tokens}, a multiple of {kv_heads}, {head_dim}] as the plan "
            "and the cache have it"
        )
    if q.dtype not in _DTYPES:
        raise KernelArgumentError(f"q is {q.dtype}, not float32 or bfloat16")
    if not q.device == k_cache.device == plan.device:
        raise KernelArgumentError(
            f"q is on {q.device}, the cache on {k_cache.device}, the plan on {plan.device}"
        )
    if rotation is not None and rotation.rotary_dim > head_dim:
        raise KernelArgumentError(f"the rotation turns {rotation.rotary_dim} dimensions of {head_dim}")
    if window < 0 or softcap < 0.0:
        raise KernelArgumentError(f"window {window} and softcap {softcap} must not be negative")
    plan.validate(num_blocks, block_size)
    if q.device.type != "cpu":
        return reference.paged_attention(
            q,
            k_cache,
            v_cache,
            plan,
            rotation=rotation,
            scale=scale,
            window=window,
            softcap=softcap,
            lse=lse,
            block_mass=block_mass,
        )
    q = _rows(q)
    out = torch.empty(q.shape, dtype=q.dtype)
    all_lse = torch.empty((num_tokens, num_heads), dtype=torch.float32) if lse else None
    mass = torch.zeros((num_heads, plan.num_entries), dtype=torch.float32) if block_mass else None
    turns = None if rotation is None else plan.turns(rotation)
    native = _native()
    native.paged_attention(
        _native_cache(k_cache, v_cache),
        native.step_plan(
            plan.query_start.data_ptr(),
            plan.query_position.data_ptr(),
            plan.segment_start.data_ptr(),
            plan.segments.data_ptr(),
            plan.block_ids.data_ptr(),
            plan.num_seqs,
            plan.num_tokens,
            plan.num_entries,
        ),
        _native_rows(q),
        _native_rows(out),
        num_heads,
        0 if turns is None else turns.data_ptr(),
        0 if rotation is None else rotation.rotary_dim,
        rotation is not None and rotation.interleaved,
        scale,
        softcap,
        window,
        0 if all_lse is None else all_lse.data_ptr(),
        0 if mass is None else mass.data_ptr(),
    )
    return AttentionResult(out, all_lse, mass)


def num_threads() -> int:
    """Threads that the CPU kernels run on, the caller's included."""
    return int(_native().num_threads())


def set_num_threads(count: int) -> None:
    """Raises KernelArgumentError unless 1 <= count <= 1024."""
    try:
        _native().set_num_threads(count)
    except ValueError as error:
        raise KernelArgumentError(str(error)) from None


def _native() -> ModuleType:
    if _kernels is None:
        raise ExtensionMissing(
            f"memkv._kernels, the compiled CPU kernels, cannot be imported: {_import_error}",
            hint="build it with: pip install --no-build-isolation -e .",
        )
    return _kernels


def _cache_shape(k_cache: Tensor, v_cache: Tensor) -> tuple[int, int, int, int]:
    if k_cache.dtype not in _DTYPES or v_cache.dtype != k_cache.dtype:
        raise KernelArgumentError(
            f"k_cache is {k_cache.dtype}, v_cache {v_cache.dtype}: float32 or bfloat16, both alike"
        )
    if k_cache.dim() != 5 or v_cache.dim() != 4:
        raise KernelArgumentError(
            f"k_cache is {list(k_cache.shape)}, v_cache {list(v_cache.shape)}: not 5-D and 4-D"
        )
    num_blocks, kv_heads, pieces, block_size, x = k_cache.shape
    head_dim = pieces * x
    if x != 16 // k_cache.element_size() or v_cache.shape != (num_blocks, kv_heads, head_dim, block_size):
        raise KernelArgumentError(
            f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} are not "
            "[num_blocks, kv_heads, head_dim / x, block_size, x] and [num_blocks, kv_heads, head_dim, block_size]"
        )
    if block_size not in (8, 16, 32) or head_dim % 8 or head_dim < 8:
        raise KernelArgumentError(
            f"block size {block_size} is not 8, 16 or 32, or head dim {head_dim} no multiple of 8"
        )
    slab = head_dim * block_size
    if k_cache.stride()[1:] != (slab, block_size * x, x, 1) or v_cache.stride()[1:] != (slab, block_size, 1):
        raise KernelArgumentError("k_cache and v_cache must be contiguous within a block")
    return num_blocks, kv_heads, head_dim, block_size


def _native_cache(k_cache: Tensor, v_cache: Tensor) -> _kernels.PagedCache:
    num_blocks, kv_heads, pieces, block_size, x = k_cache.shape
    return _native().paged_cache(
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.stride(0),
        v_cache.stride(0),
        num_blocks,
        kv_heads,
        pieces * x,
        block_size,
        _DTYPES[k_cache.dtype],
    )


def _rows(tensor: Tensor) -> Tensor:
    """float32 or bfloat16 with a contiguous last dimension, copied only where it is neither."""
    if tensor.dtype not in _DTYPES:
        tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _native_rows(tensor: Tensor) -> _kernels.HeadRows:
    return _native().head_rows(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), _DTYPES[tensor.dtype])
