"""The kernels' typed face: shapes are checked here, pointers go to C++; the rest takes the reference.

    k_cache  [num_blocks, kv_heads, head_dim / x, block_size, x]      x = 16 bytes / element
    v_cache  [num_blocks, kv_heads, head_dim, block_size]

Both are views of one layer of the block pool: only the stride between blocks is free. On a CPU they are
float32 or bfloat16; block size 8, 16 or 32; head_dim a multiple of 8 up to 512. On an NVIDIA GPU the CUDA
kernels serve bfloat16 and float16, and head_dim 64, 80, 96, 128 and 256.
"""

from __future__ import annotations

import math
import os
import statistics
import time

import torch
from torch import Tensor

from memkv.errors import KernelArgumentError
from memkv.kernels import cuda, reference
from memkv.kernels.native import CPU_DTYPES, DTYPES, _kernels, cache_of, require_extension, rows_of
from memkv.kernels.plan import AttentionPlan, AttentionResult, Rotation

__all__ = [
    "AttentionPlan",
    "AttentionResult",
    "Rotation",
    "calibrate_threads",
    "copy_blocks",
    "isa",
    "measure_read_bandwidth",
    "num_threads",
    "paged_attention",
    "prefer_huge_pages",
    "runnable_isas",
    "set_isa",
    "set_num_threads",
    "write_kv",
]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Put keys and values of new tokens into their slots, converted to the cache's dtype.

    Args:
        k, v: [num_tokens, kv_heads, head_dim], any float dtype.
        k_cache, v_cache: see the module's docstring.
        slots: int64 [num_tokens], block * block_size + offset; no slot twice. The CUDA kernel, which cannot
            report them, leaves out rows whose slot is outside the pool: -1 is the slot of a padded row.

    Raises:
        KernelArgumentError: shapes or dtypes do not fit, or a slot is outside the pool; nothing was written.
        ExtensionMissing: CPU tensors, but the extension was not built.
    """
    _, kv_heads, head_dim, _ = _cache_shape(k_cache, v_cache)
    expected = (slots.numel(), kv_heads, head_dim)
    if k.shape != expected or v.shape != expected:
        raise KernelArgumentError(
            f"k is {list(k.shape)} and v is {list(v.shape)}; the cache and the slots ask for "
            f"[num_tokens, kv_heads, head_dim] = {list(expected)}"
        )
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise KernelArgumentError(
            f"slots are {slots.dtype} {list(slots.shape)}, not contiguous int64 [num_tokens]"
        )
    if not k.device == v.device == slots.device == k_cache.device:
        raise KernelArgumentError(
            f"k is on {k.device}, slots on {slots.device}, the cache on {k_cache.device}"
        )
    on_cpu = k_cache.device.type == "cpu"
    if not on_cpu and not cuda.serves_cache(k_cache):
        reference.write_kv(k, v, k_cache, v_cache, slots)
        return
    if on_cpu:
        require_extension()
    k, v = _rows(k), _rows(v)
    if k.dtype != v.dtype:
        k, v = k.float(), v.float()
    if not on_cpu:
        cuda.write_kv(k, v, k_cache, v_cache, slots)
        return
    cache = cache_of(k_cache, v_cache)
    try:
        _kernels.write_kv(cache, rows_of(k), rows_of(v), slots.data_ptr(), slots.numel())
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
    """Attention of each query row over its sequence's segments, as if keys stood where they are mapped.

    On a CPU a sequence's result depends on neither the batch nor the number of threads, to the bit. On a GPU
    it repeats to the bit, but how a sequence's keys are cut into ranges follows the batch.

    Args:
        q: [num_tokens, num_heads, head_dim], rotated to its position by the model; float32 or bfloat16, on a
            GPU float16 too.
        k_cache, v_cache: see the module's docstring.
        plan: checked against this pool on its first use.
        rotation: the layer's RoPE; None for a layer without.
        scale: multiplies every score.
        window: a query sees keys at positions in (its own - window, its own]; 0 sees all up to its own.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        lse, block_mass: also return them.

    Raises:
        KernelArgumentError: shapes, dtypes or devices do not fit, or the plan does not fit the pool.
        ExtensionMissing: CPU tensors, but the extension was not built.
    """
    _check_attention(q, k_cache, v_cache, plan, rotation)
    if window < 0 or not softcap >= 0.0 or not math.isfinite(scale):
        raise KernelArgumentError(
            f"scale {scale}, window {window}, softcap {softcap}: not finite or negative"
        )
    if cuda.serves(q, k_cache):
        attend = cuda.paged_attention
    else:
        attend = _attend_on_cpu if q.device.type == "cpu" else reference.paged_attention
    return attend(
        q,
        k_cache,
        v_cache,
        plan,
        rotation=rotation,
        scale=scale,
        window=min(window, _NO_WINDOW),
        softcap=softcap,
        lse=lse,
        block_mass=block_mass,
    )


def copy_blocks(source: Tensor, source_ids: Tensor | None, target: Tensor, target_ids: Tensor | None) -> None:
    """target[target_ids] = source[source_ids], whole blocks; None for ids that count up from 0.

    Gathers blocks of a pool into a staging buffer, scatters them back, or moves them inside a pool where the
    two sets of ids have no block in common. Without ids, as many blocks as both have.

    Args:
        source, target: [num_blocks, bytes_per_block] uint8, contiguous; on a GPU, source may be pinned host
            memory.
        source_ids, target_ids: int64 [count], on target's device.
    """
    for storage in (source, target):
        if storage.dtype != torch.uint8 or storage.dim() != 2 or not storage.is_contiguous():
            raise KernelArgumentError(
                f"blocks are {storage.dtype} {list(storage.shape)}, not contiguous uint8 [num_blocks, bytes]"
            )
    if source.shape[1] != target.shape[1] or source.shape[1] % 16:
        raise KernelArgumentError(
            f"blocks of {source.shape[1]} and of {target.shape[1]} bytes are not equal multiples of 16"
        )
    counts = [
        storage.shape[0] if ids is None else ids.numel()
        for storage, ids in ((source, source_ids), (target, target_ids))
    ]
    whole = [counts[i] for i, ids in enumerate((source_ids, target_ids)) if ids is not None] or [min(counts)]
    if min(counts) < max(whole) or len(set(whole)) > 1:
        raise KernelArgumentError(f"{counts[0]} blocks cannot go to {counts[1]} places")
    for ids in (source_ids, target_ids):
        if ids is not None and (ids.dtype != torch.int64 or ids.dim() != 1 or ids.device != target.device):
            raise KernelArgumentError(
                f"ids are {ids.dtype} {list(ids.shape)} on {ids.device}, not int64 [count]"
            )
    if target.device.type == "cuda" and cuda.built() and (source.is_cuda or source.is_pinned()):
        cuda.copy_blocks(
            source if source_ids is not None else source[: whole[0]], source_ids, target, target_ids
        )
        return
    rows = source[: whole[0]] if source_ids is None else source[source_ids.to(source.device)]
    if target_ids is None:
        target[: rows.shape[0]] = rows.to(target.device)
    else:
        target[target_ids] = rows.to(target.device)


def num_threads() -> int:
    """Threads that the CPU kernels run on, the caller's included."""
    require_extension()
    return _kernels.num_threads()


def set_num_threads(count: int) -> None:
    """Raises KernelArgumentError unless 1 <= count <= 1024."""
    require_extension()
    try:
        _kernels.set_num_threads(count)
    except (TypeError, ValueError) as error:
        raise KernelArgumentError(f"{count} threads: {error}") from None


def calibrate_threads(max_threads: int | None = None) -> int:
    """Measure the kernels with 1 .. max_threads threads and keep the best number; returns it.

    Takes some 0.2 s for each number tried (1, 2, 3, 4, 6, 8, 12, ...) and 80 MB meanwhile. Both loops count:
    decode over more KV than most caches hold, and a tile of prefill. Of numbers within 5 % the least wins.

    Args:
        max_threads: the processors that this process may use, unless given.
    """
    limit = max_threads or _usable_processors()
    powers = [2**i for i in range(11)]
    candidates = {n for n in (*powers, *(3 * power for power in powers)) if n < limit} | {limit}
    cost = {n: _measure_threads(n) for n in sorted(candidates)}
    best = min(n for n in cost if cost[n] <= 1.05 * min(cost.values()))
    set_num_threads(best)
    return best


def isa() -> str:
    """The instruction set in use: "scalar", "avx2" or "avx512"."""
    require_extension()
    return _kernels.isa()


def set_isa(name: str) -> None:
    """Use another instruction set, as $MEMKV_ISA does at the start; for tests and measurements.

    Raises:
        KernelArgumentError: this machine cannot run it.
    """
    require_extension()
    try:
        _kernels.set_isa(name)
    except ValueError as error:
        raise KernelArgumentError(str(error)) from None


def runnable_isas() -> list[str]:
    """The instruction sets that this machine can run, the best of them last."""
    require_extension()
    return _kernels.runnable_isas()


def measure_read_bandwidth(num_bytes: int = 1 << 28, passes: int = 5) -> float:
    """GB/s (1e9 bytes) at which the kernels' threads read memory once, in order: the best of some passes."""
    require_extension()
    data = torch.empty(max(num_bytes, 4) // 4, dtype=torch.float32)
    prefer_huge_pages(data)
    data.zero_()
    seconds = []
    for _ in range(passes):
        begin = time.perf_counter()
        _kernels.read_floats(data.data_ptr(), data.numel())
        seconds.append(time.perf_counter() - begin)
    return data.numel() * 4 / min(seconds) / 1e9


def prefer_huge_pages(storage: Tensor) -> bool:
    """Ask for huge pages under a CPU tensor that was allocated but not yet written, such as the block pool.

    Returns whether the system agreed. Attention over a large pool misses the TLB at every block without them.
    """
    require_extension()
    if storage.device.type != "cpu" or not storage.is_contiguous():
        return False
    return _kernels.prefer_huge_pages(storage.data_ptr(), storage.numel() * storage.element_size())


_MAX_HEAD_DIM = 512  # csrc/cpu/tile.h: kMaxHeadDim
_NO_WINDOW = 2**31 - 1


def _cache_shape(k_cache: Tensor, v_cache: Tensor) -> tuple[int, int, int, int]:
    """num_blocks, kv_heads, head_dim, block_size."""
    if k_cache.dim() != 5 or v_cache.dim() != 4:
        raise KernelArgumentError(
            f"k_cache is {list(k_cache.shape)} and v_cache {list(v_cache.shape)}, not 5-D and 4-D"
        )
    num_blocks, kv_heads, pieces, block_size, x = k_cache.shape
    head_dim = pieces * x
    if x != 16 // k_cache.element_size() or v_cache.shape != (num_blocks, kv_heads, head_dim, block_size):
        raise KernelArgumentError(
            f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} are not [num_blocks, kv_heads, "
            "head_dim / x, block_size, x] and [num_blocks, kv_heads, head_dim, block_size]"
        )
    if k_cache.dtype != v_cache.dtype or k_cache.device != v_cache.device:
        raise KernelArgumentError(
            f"k_cache is {k_cache.dtype} on {k_cache.device}, v_cache {v_cache.dtype} on {v_cache.device}"
        )
    slab = head_dim * block_size
    if k_cache.stride()[1:] != (slab, block_size * x, x, 1) or v_cache.stride()[1:] != (slab, block_size, 1):
        raise KernelArgumentError("k_cache and v_cache must be contiguous within a block")
    if k_cache.device.type == "cpu":
        if k_cache.dtype not in CPU_DTYPES:
            raise KernelArgumentError(f"the cache is {k_cache.dtype}: on a CPU, float32 or bfloat16")
        if block_size not in (8, 16, 32) or head_dim % 8 or not 8 <= head_dim <= _MAX_HEAD_DIM:
            raise KernelArgumentError(
                f"block size {block_size} is not 8, 16 or 32, or head_dim {head_dim} is not a multiple of 8 "
                f"up to {_MAX_HEAD_DIM}"
            )
    return num_blocks, kv_heads, head_dim, block_size


def _check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, rotation: Rotation | None
) -> None:
    num_blocks, kv_heads, head_dim, block_size = _cache_shape(k_cache, v_cache)
    if q.dim() != 3 or q.shape[::2] != (plan.num_tokens, head_dim) or q.shape[1] % kv_heads or not q.shape[1]:
        raise KernelArgumentError(
            f"q is {list(q.shape)}; the plan and the cache ask for "
            f"[{plan.num_tokens}, a multiple of {kv_heads}, {head_dim}]"
        )
    if not q.device == k_cache.device == plan.device:
        raise KernelArgumentError(
            f"q is on {q.device}, the cache on {k_cache.device}, the plan on {plan.device}"
        )
    if q.device.type == "cpu" and q.dtype not in CPU_DTYPES:
        raise KernelArgumentError(f"q is {q.dtype}: on a CPU, float32 or bfloat16")
    if rotation is not None and rotation.rotary_dim > head_dim:
        raise KernelArgumentError(f"the rotation turns {rotation.rotary_dim} dimensions of {head_dim}")
    plan.validate(num_blocks, block_size)


def _attend_on_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    rotation: Rotation | None,
    scale: float,
    window: int,
    softcap: float,
    lse: bool,
    block_mass: bool,
) -> AttentionResult:
    """As `paged_attention`, whose arguments were checked."""
    require_extension()
    q = _rows(q)
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    all_lse = torch.empty((num_tokens, num_heads), dtype=torch.float32) if lse else None
    mass = torch.zeros((num_heads, plan.num_entries), dtype=torch.float32) if block_mass else None
    turns = None if rotation is None else plan.turns(rotation)
    _kernels.paged_attention(
        cache_of(k_cache, v_cache),
        cuda.step_plan(plan),
        rows_of(q),
        rows_of(out),
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


def _rows(tensor: Tensor) -> Tensor:
    """A dtype that kernels read, with a contiguous last dimension; copied only where it is not."""
    if tensor.dtype not in (CPU_DTYPES if tensor.device.type == "cpu" else DTYPES):
        tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _usable_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _measure_threads(count: int) -> float:
    """Seconds of a decode step times seconds of a tile of prefill: the geometric mean, but for the root."""
    set_num_threads(count)
    block_size, kv_heads, head_dim, num_blocks = 16, 8, 128, 1024  # 64 MiB
    cache = torch.zeros(num_blocks, 2, kv_heads, head_dim * block_size, dtype=torch.bfloat16)
    k_cache = cache[:, 0].view(num_blocks, kv_heads, head_dim // 8, block_size, 8)
    v_cache = cache[:, 1].view(num_blocks, kv_heads, head_dim, block_size)
    cost = 1.0
    for num_rows, blocks in ((1, num_blocks), (32, num_blocks // 8)):
        num_keys = blocks * block_size
        plan = AttentionPlan.build([[(range(blocks), num_keys, 0, 0)]], [[num_keys] * num_rows])
        q = torch.zeros(num_rows, 32, head_dim)
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            paged_attention(q, k_cache, v_cache, plan, rotation=None, scale=1.0)
            seconds.append(time.perf_counter() - begin)
        cost *= statistics.median(seconds)
    return cost
