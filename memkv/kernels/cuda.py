"""The CUDA kernels: which calls they serve, and what a step's plan becomes for them.

    plan     ──► work of groups      segments whose blocks several sequences of few rows map: read once
             ──► work of few rows    sequences of 1 .. 16 rows (query tokens * heads of a kv head): decode
             ──► work of many rows   the others: prefill, questions, recomputed blocks

A work is planned on the device once for all layers of a step that have its shape and window; nothing is
copied back, so that a step can be captured in a CUDA graph. `AttentionPlan.refresh` has it planned again.
Where block mass is wanted, nothing is read together, and a second pass adds it up: over the same work of
few rows, for many rows over a work whose tiles are larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from memkv.kernels.native import DTYPES, _kernels, cache_of, rows_of
from memkv.kernels.plan import AttentionPlan, AttentionResult, Rotation

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How work is cut. 0: as the kernels choose.

    Attributes:
        ranges_per_worker: more keep workers to the same kv heads at a time, fewer have less to merge.
        warps, stages: of a block of threads of the decode loop, and of a warp's ring.
        fixed_range: stages of every range, wherever it lies: a sequence's bits are the same in any batch.
        split: False gives each unit one worker.
        overlap: a decode kernel may begin while the kernel before it ends.
        least_saved: tokens that are read once less for blocks that sequences share, before they are shared.
    """

    ranges_per_worker: int = 0
    warps: int = 0
    stages: int = 0
    fixed_range: int = 0
    split: bool = True
    overlap: bool = True
    least_saved: int = 0


@contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Plans made inside are cut this way; for tests and measurements."""
    global _tuning
    before, _tuning = _tuning, tuning
    try:
        yield
    finally:
        _tuning = before


def built() -> bool:
    """Whether the extension has CUDA kernels."""
    return _kernels is not None and hasattr(_kernels, "cuda_built") and bool(_kernels.cuda_built())


def serves_cache(k_cache: Tensor) -> bool:
    """Whether the kernels read and write a cache of this device, dtype and shape."""
    _, _, pieces, block_size, x = k_cache.shape
    return (
        k_cache.device.type == "cuda"
        and built()
        and k_cache.dtype in (torch.bfloat16, torch.float16)
        and pieces * x in HEAD_DIMS
        and block_size in BLOCK_SIZES
        and _is_new_enough(k_cache.device.index or 0)
    )


def serves(q: Tensor, k_cache: Tensor) -> bool:
    """Whether `paged_attention` has a kernel for the call."""
    return serves_cache(k_cache) and q.dtype in DTYPES and q.shape[1] // k_cache.shape[1] <= _MAX_GROUP


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """As `ops.write_kv`; rows whose slot is outside the pool are left out."""
    with torch.cuda.device(k_cache.device):
        _kernels.cuda_write_kv(
            cache_of(k_cache, v_cache),
            rows_of(k),
            rows_of(v),
            slots.data_ptr(),
            slots.numel(),
            _stream(k_cache.device),
        )


def paged_attention(
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
    """As `ops.paged_attention`, whose arguments were checked."""
    device = q.device
    num_tokens, num_heads, _ = q.shape
    if q.stride(0) % 2 or q.stride(1) % 2 or q.stride(2) != 1 or q.data_ptr() % 4:
        q = q.contiguous()  # elements are read two at a time
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    real = partial(torch.zeros, dtype=torch.float32, device=device)
    all_lse = real((num_tokens, num_heads)) if lse or block_mass else None
    if num_tokens == 0:
        mass = real((num_heads, plan.num_entries)) if block_mass else None
        return AttentionResult(out, all_lse if lse else None, mass)
    with torch.cuda.device(device):
        stream = _stream(device)
        native_cache = cache_of(k_cache, v_cache)
        _, kv_heads, head_dim, size = v_cache.shape
        mixed = q.dtype != k_cache.dtype
        shape = _Shape(
            kv_heads, num_heads // kv_heads, head_dim, size, k_cache.dtype, mixed, window, not block_mass
        )
        works, planned = _works(plan, native_cache, shape, stream)
        masses = _mass_works(plan, native_cache, shape, works, stream) if block_mass else []
        tiles = max((work.tiles_of_one for work in masses), default=0)
        planes = real((tiles, num_heads, plan.num_entries)) if block_mass else None
        turned = rotation is not None and plan.kept_turns(rotation) is None
        turns = None if rotation is None else _turns(plan, rotation, stream)
        call = _kernels.cuda_attention(
            native_cache,
            step_plan(plan),
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
            0 if planes is None else planes.data_ptr(),
            lse,  # without it, many rows keep the digits that a query came with
        )
        for index, work in enumerate(works):
            # The planner, or a kernel beside which another one may run, must not be the one before.
            overlap = _tuning.overlap and not (turned or planned or index)
            _kernels.cuda_attend(call, work.native, work.loop, shape.exact, overlap, stream)
            if work.slots is not None:
                _kernels.cuda_join_shared(call, work.native, stream)
        if planes is None:
            return AttentionResult(out, all_lse)
        for work in masses:
            _kernels.cuda_add_block_mass(call, work.native, work.loop, shape.exact, stream)
    mass = planes[0] if planes.shape[0] == 1 else planes.sum(0)
    return AttentionResult(out, all_lse if lse else None, mass)


def worth_sharing(plan: AttentionPlan, kv_heads: int, group: int, head_dim: int) -> bool:
    """Whether sequences of one row each may save something by reading blocks together."""
    shape = _Shape(kv_heads, group, head_dim, 0, torch.bfloat16, exact=False, window=0, shares=True)
    return _may_share(plan, shape, 1, _least_saved(shape))


def copy_blocks(source: Tensor, source_ids: Tensor | None, target: Tensor, target_ids: Tensor | None) -> None:
    """As `ops.copy_blocks`, on tensors that are contiguous in whole rows."""
    ids = source_ids if source_ids is not None else target_ids
    count = source.shape[0] if ids is None else ids.numel()
    with torch.cuda.device(target.device):
        _kernels.cuda_copy_blocks(
            source.data_ptr(),
            0 if source_ids is None else source_ids.data_ptr(),
            target.data_ptr(),
            0 if target_ids is None else target_ids.data_ptr(),
            count,
            source.stride(0) * source.element_size(),
            _stream(target.device),
        )


def read_memory(data: Tensor) -> None:
    """Reads a contiguous tensor once, in order: for measuring what memory gives."""
    sink = torch.empty(1, dtype=torch.int32, device=data.device)
    with torch.cuda.device(data.device):
        num_bytes = data.numel() * data.element_size() // 16 * 16
        _kernels.cuda_read_memory(data.data_ptr(), num_bytes, sink.data_ptr(), _stream(data.device))


def step_plan(plan: AttentionPlan) -> _kernels.StepPlan:
    """The plan's tensors as the kernels take them."""
    return _kernels.step_plan(
        plan.query_start.data_ptr(),
        plan.query_position.data_ptr(),
        plan.segment_start.data_ptr(),
        plan.segments.data_ptr(),
        plan.block_ids.data_ptr(),
        plan.num_seqs,
        plan.num_tokens,
        plan.num_entries,
    )


_MAX_GROUP = 32  # query heads of a kv head: more are not tested
_FEW, _MANY, _MASS = 0, 1, 2  # csrc/cuda/launch.h: Loop
_FEW_ROWS = 16
_LEADS = (0, 7, 7)  # of each loop: what a unit costs beside its stages, in stages
_FEW_PART_COST = 2048  # what a worker's second unit costs in the decode loop: stages x head_dim
_CACHED_BYTES = 48 << 20  # of K and V of a layer: what an L2 cache keeps while workers read it in no order
_LEAST_SHARED_ROWS = 32  # of a kv head, in a group: fewer leave the loop of many rows idle
_LEAST_SAVED_BYTES = 128 << 20  # of K and V of a layer: what the passes over groups take to read
_MOST_SHARED_SEGMENTS = 2048  # csrc/cuda/launch.h: kMostSharedSegments
_ALL_ROWS = 2**31 - 1
_tuning = Tuning()


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the works of a plan depend on."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    exact: bool  # queries of another dtype than the cache: float32, as a rule
    window: int
    shares: bool  # whether sequences may read blocks together


@dataclass(slots=True)
class _Work:
    native: _kernels.Work
    loop: int
    tiles_of_one: int  # of a sequence, at most
    memory: tuple[Tensor, ...]  # what `native` points to
    least_saved: int = 0  # of a work of groups, as Tuning.least_saved
    slots: Tensor | None = (
        None  # where its sequences share blocks: [num_segments], -1 for those of one reader
    )
    planned: bool = False


def _works(
    plan: AttentionPlan, cache: _kernels.PagedCache, shape: _Shape, stream: int
) -> tuple[list[_Work], bool]:
    """The works that together cover all sequences, planned; and whether they were planned just now."""
    works: list[_Work] | None = plan.derived.get(shape)
    if works is None:
        counts = plan.query_counts()
        rows = [count * shape.group for count in counts]
        few = max((count for count in rows if 0 < count <= _FEW_ROWS), default=0)
        works = []
        most = max(rows, default=0)
        if shape.exact or (most > _FEW_ROWS and not _fits_many(plan, cache, shape)):
            works.append(_new_work(plan, cache, shape, _FEW, 8 if shape.exact else 16, (1, _ALL_ROWS)))
        else:
            if few:
                own = _new_work(plan, cache, shape, _FEW, 8 if few <= 8 else 16, (1, _FEW_ROWS))
                works.extend(_with_groups(plan, cache, shape, own, few // shape.group))
            if most > _FEW_ROWS:
                works.append(_new_work(plan, cache, shape, _MANY, 0, (_FEW_ROWS + 1, _ALL_ROWS)))
        plan.derived[shape] = works
    planned = [_plan(plan, work, shape, stream) for work in works]
    return works, any(planned)


def _mass_works(
    plan: AttentionPlan, cache: _kernels.PagedCache, shape: _Shape, works: list[_Work], stream: int
) -> list[_Work]:
    """Those that give block mass: for many rows ones with tiles of their own, planned."""
    if all(work.loop == _FEW for work in works):
        return works
    masses: list[_Work] | None = plan.derived.get((shape, _MASS))
    if masses is None:
        masses = [
            work if work.loop == _FEW else _new_work(plan, cache, shape, _MASS, 0, (_FEW_ROWS + 1, _ALL_ROWS))
            for work in works
        ]
        plan.derived[shape, _MASS] = masses
    for work in masses:
        _plan(plan, work, shape, stream)
    return masses


def _plan(plan: AttentionPlan, work: _Work, shape: _Shape, stream: int) -> bool:
    """Whether there was anything to do."""
    if work.planned:
        return False
    if work.least_saved:
        _kernels.cuda_plan_shared(
            step_plan(plan), work.native, shape.block_size, _LEAST_SHARED_ROWS, work.least_saved, stream
        )
    else:
        _kernels.cuda_plan_work(step_plan(plan), work.native, stream)
    work.planned = True
    return True


def _with_groups(
    plan: AttentionPlan, cache: _kernels.PagedCache, shape: _Shape, own: _Work, most_tokens: int
) -> list[_Work]:
    """The work of few rows, behind the work of what its sequences share where that may be worth it."""
    least_saved = _least_saved(shape)
    if not _may_share(plan, shape, most_tokens, least_saved) or not _fits_many(plan, cache, shape):
        return [own]
    own_rows = plan.num_segments * most_tokens  # of `kept` in front: query tokens of each shared segment
    kept_rows = own_rows + plan.num_seqs * most_tokens
    slots = torch.empty(plan.num_segments, dtype=torch.int32, device=plan.device)
    rows = torch.empty(own_rows, 4, dtype=torch.int32, device=plan.device)
    floats = kept_rows * shape.kv_heads * shape.group * (shape.head_dim + 4)
    kept = torch.empty(floats, dtype=torch.float32, device=plan.device)
    groups = _new_work(plan, cache, shape, _MANY, 0, (1, _FEW_ROWS), group_rows=own_rows * shape.group)
    groups.least_saved, own.slots = least_saved, slots
    for work in (groups, own):
        work.native = _kernels.cuda_share(
            work.native,
            slots.data_ptr(),
            rows.data_ptr(),
            kept.data_ptr(),
            own_rows,
            kept_rows,
            most_tokens,
            work is groups,
        )
        work.memory += (slots, rows, kept)
    return [groups, own]


def _least_saved(shape: _Shape) -> int:
    """Tokens."""
    return _tuning.least_saved or _LEAST_SAVED_BYTES // (4 * shape.kv_heads * shape.head_dim)


def _may_share(plan: AttentionPlan, shape: _Shape, most_tokens: int, least_saved: int) -> bool:
    """Whether sequences of few rows may save so many tokens; the planner on the device looks closer."""
    fixed = _tuning.fixed_range or not _tuning.split  # a sequence's bits must not depend on the batch
    if not (shape.shares and plan.may_share) or fixed or plan.num_seqs < 2:
        return False
    if plan.num_segments > _MOST_SHARED_SEGMENTS:
        return False
    found = plan.segments_by_blocks(_FEW_ROWS // shape.group)
    if found is None:
        return True
    saved = sum(
        (count - 1) * (min(tokens, shape.window) if shape.window else tokens)
        for (_, tokens), count in found.items()
        if count * most_tokens * shape.group >= _LEAST_SHARED_ROWS
    )
    return saved >= least_saved


def _new_work(
    plan: AttentionPlan,
    cache: _kernels.PagedCache,
    shape: _Shape,
    loop: int,
    tile_rows: int,
    rows: tuple[int, int],
    group_rows: int = 0,
) -> _Work:
    """Work for the sequences that have so many rows; or for groups, of at most `group_rows` rows together."""
    device = plan.device
    fits = _loop_shape(device, cache, shape, loop, tile_rows)
    if fits.workers == 0:
        raise RuntimeError(f"bug: loop {loop} for {shape} does not fit this GPU")
    tiles = [
        -(-count * shape.group // fits.tile_rows)
        for count in plan.query_counts()
        if rows[0] <= count * shape.group <= rows[1]
    ]
    max_tiles, tiles_of_one = sum(tiles), max(tiles, default=0)
    max_runs = tiles_of_one * plan.num_segments + max_tiles
    max_stages = tiles_of_one * plan.num_entries * shape.kv_heads  # of all units
    if group_rows:
        max_tiles = group_rows // fits.tile_rows + group_rows // _LEAST_SHARED_ROWS
        max_runs = 2 * max_tiles
    cut = _cut(plan, shape, fits, loop, max_tiles, max_stages, of_groups=group_rows > 0)
    native_shape = _kernels.cuda_work_shape(
        fits.tile_rows,
        fits.stage_tokens,
        shape.group,
        shape.kv_heads,
        shape.window,
        *rows,
        cut.workers,
        cut.max_ranges,
        cut.flat_ranges,
        cut.whole_ranges,
        fits.warps if loop == _FEW else 1,
        cut.fixed_range,
        cut.lead,
        cut.part_cost,
    )
    of_many = (plan.num_entries, plan.num_segments, shape.block_size) if loop != _FEW else (0, 0, 0)
    packed = _kernels.PackedSize(*of_many)
    num_bytes = _kernels.cuda_work_bytes(native_shape, plan.num_seqs, max_tiles, max_runs, packed)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    floats = 2 * cut.max_ranges * fits.tile_rows * (shape.head_dim + 4) if loop != _MASS else 0
    partials = torch.empty(floats, dtype=torch.float32, device=device)
    native = _kernels.cuda_work(
        memory.data_ptr(),
        partials.data_ptr(),
        native_shape,
        plan.num_seqs,
        max_tiles,
        max_runs,
        packed,
        cut.grid,
        fits.warps,
        fits.stages,
    )
    return _Work(native, loop, max(1, tiles_of_one), (memory, partials))


def _rounds(plan: AttentionPlan, shape: _Shape, max_tiles: int) -> int:
    """Ranges of each worker. Those of one round lie in the same kv heads, whose K and V stay in the L2 cache.

    On an H200 that pays from some 64 tiles of a kv head on; where all fits in the cache it never does.
    """
    num_bytes = 4 * plan.num_entries * shape.block_size * shape.kv_heads * shape.head_dim
    return min(max(1, max_tiles // 32), 4, shape.kv_heads) if num_bytes > _CACHED_BYTES else 1


@dataclass(frozen=True, slots=True)
class _Cut:
    """How units become ranges, as csrc/include/memkv/work_split.h: WorkShape has it."""

    workers: int
    max_ranges: int
    flat_ranges: int
    whole_ranges: int
    grid: int
    fixed_range: int = 0
    lead: int = 0
    part_cost: int = 0


def _cut(
    plan: AttentionPlan,
    shape: _Shape,
    fits: _kernels.LoopShape,
    loop: int,
    max_tiles: int,
    max_stages: int,
    *,
    of_groups: bool,
) -> _Cut:
    """What a plan's work may be cut into; the planner on the device chooses."""
    tuning, units = _tuning, max_tiles * shape.kv_heads
    if tuning.fixed_range or not tuning.split:
        fixed_range = tuning.fixed_range if tuning.split else max(1, plan.num_entries)
        most = max(1, units + (max_stages // fixed_range if tuning.split else 0))
        return _Cut(1, most, most, 0, most, fixed_range)
    in_turn = tuning.ranges_per_worker
    if loop == _FEW:
        processors = torch.cuda.get_device_properties(plan.device).multi_processor_count
        workers = min(processors, fits.workers)
        flat = _few_flat_ranges(workers, fits, max_stages) * max(1, in_turn)
        whole = 0 if in_turn else _few_whole_ranges(units, workers, fits, shape.head_dim, max_stages)
        grid = max(flat, whole)
        if 0 < whole <= workers:
            flat = grid = whole  # blocks without work would let the next layer's gather on few processors
        part_cost = _FEW_PART_COST // shape.head_dim
    else:
        grid, part_cost = fits.workers, _LEADS[loop]
        workers = grid
        rounds = in_turn or (1 if of_groups else _rounds(plan, shape, max_tiles))
        flat, whole = workers * rounds, workers if rounds == 1 and not in_turn else 0
    most = max(flat, whole) if of_groups else max(1, min(max(flat, whole), max_stages))
    return _Cut(workers, most, min(flat, most), whole, min(grid, most), 0, _LEADS[loop], part_cost)


def _few_flat_ranges(workers: int, fits: _kernels.LoopShape, stages: int) -> int:
    """One for each processor, so that the next layer's begin beside them, or as many as fit.

    More have more to merge; on an H200 they pay where a warp of one would have 5 to 8 stages.
    """
    return fits.workers if 4 < stages / (workers * fits.warps) <= 8 else workers


def _few_whole_ranges(units: int, workers: int, fits: _kernels.LoopShape, head_dim: int, stages: int) -> int:
    """As many as units of one length divide into evenly, where that leaves few workers without; 0: none.

    One for each worker, or two where that many are resident and each warp has two stages, or four where there
    are so many units. Of less than 128 dimensions, whose stages are small, two serve memory better.
    """
    least = 0.95 if head_dim >= 128 else 0.9
    both = fits.workers >= 2 * workers and stages >= 4 * workers * fits.warps
    turns = (1,) if not both else (1, 2) if head_dim >= 128 else (2, 1)
    for in_turn in turns:
        ranges = in_turn * workers // max(1, units) * units
        if ranges >= least * in_turn * workers:
            return ranges
    ranges = 4 * workers // max(1, units) * units
    return ranges if units > 2 * workers and ranges >= least * 4 * workers else 0


_loop_shapes: dict[tuple[object, ...], _kernels.LoopShape] = {}


def _loop_shape(
    device: torch.device, cache: _kernels.PagedCache, shape: _Shape, loop: int, tile_rows: int
) -> _kernels.LoopShape:
    """How many workers a device holds, and of what size; asked once."""
    exact = shape.exact and loop == _FEW
    tuning = (_tuning.warps, _tuning.stages)
    key = (device, shape.head_dim, shape.block_size, shape.dtype, loop, tile_rows, exact, tuning)
    if key not in _loop_shapes:
        _loop_shapes[key] = _kernels.cuda_loop_shape(loop, cache, tile_rows, exact, *tuning)
    return _loop_shapes[key]


def _fits_many(plan: AttentionPlan, cache: _kernels.PagedCache, shape: _Shape) -> bool:
    """Its tiles take more shared memory than consumer GPUs have."""
    return bool(_loop_shape(plan.device, cache, shape, _MANY, 0).workers > 0)


def _turns(plan: AttentionPlan, rotation: Rotation, stream: int) -> Tensor:
    """As `AttentionPlan.turns`, by one kernel."""
    found: Tensor | None = plan.kept_turns(rotation)
    if found is None:
        shape = (plan.num_segments, 2, rotation.rotary_dim // 2)
        found = plan.turns_memory(rotation)
        if found is None:
            found = torch.empty(shape, dtype=torch.float32, device=plan.device)
        inv_freq = rotation.inv_freq.to(plan.device)
        _kernels.cuda_turn_rows(
            plan.segments.data_ptr(),
            plan.num_segments,
            inv_freq.data_ptr(),
            inv_freq.numel(),
            found.data_ptr(),
            stream,
        )
        plan.keep_turns(rotation, found)
    return found


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@cache
def _is_new_enough(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
