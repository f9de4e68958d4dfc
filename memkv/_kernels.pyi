"""The compiled kernels, as `csrc/bindings/module.cpp` lists them.

Addresses are integers; dtype 0 is float32, 1 bfloat16, 2 float16; strides are in elements; a
stream is a cudaStream_t. What begins with cuda_ throws where the extension was built without CUDA.
"""

class PagedCache: ...
class StepPlan: ...
class HeadRows: ...

def paged_cache(
    k: int,
    v: int,
    k_block_stride: int,
    v_block_stride: int,
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: int,
) -> PagedCache: ...
def step_plan(
    query_start: int,
    query_position: int,
    segment_start: int,
    segments: int,
    block_ids: int,
    num_seqs: int,
    num_tokens: int,
    num_entries: int,
) -> StepPlan: ...
def head_rows(data: int, token_stride: int, head_stride: int, dtype: int) -> HeadRows: ...
def write_kv(cache: PagedCache, k: HeadRows, v: HeadRows, slots: int, num_tokens: int) -> None: ...
def paged_attention(
    cache: PagedCache,
    plan: StepPlan,
    q: HeadRows,
    out: HeadRows,
    num_heads: int,
    turns: int,
    rotary_dim: int,
    interleaved: bool,
    scale: float,
    softcap: float,
    window: int,
    lse: int,
    block_mass: int,
) -> None: ...
def read_floats(data: int, count: int) -> float: ...
def prefer_huge_pages(begin: int, bytes: int) -> bool: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def runnable_isas() -> list[str]: ...

class Attention: ...
class Work: ...
class WorkShape: ...

class PackedSize:
    def __init__(self, num_entries: int, num_segments: int, block_size: int) -> None: ...

class LoopShape:
    tile_rows: int
    stage_tokens: int
    warps: int
    stages: int
    workers: int

def cuda_built() -> bool: ...
def cuda_attention(
    cache: PagedCache,
    plan: StepPlan,
    q: HeadRows,
    out: HeadRows,
    num_heads: int,
    turns: int,
    rotary_dim: int,
    interleaved: bool,
    scale: float,
    softcap: float,
    window: int,
    lse: int,
    block_mass: int,
    all_digits: bool,
) -> Attention: ...
def cuda_loop_shape(
    loop: int, cache: PagedCache, tile_rows: int, exact: bool, warps: int, stages: int
) -> LoopShape: ...
def cuda_work_shape(
    tile_rows: int,
    stage_tokens: int,
    group: int,
    num_kv_heads: int,
    window: int,
    least_rows: int,
    most_rows: int,
    workers: int,
    max_ranges: int,
    flat_ranges: int,
    whole_ranges: int,
    least_range: int,
    fixed_range: int,
    lead: int,
    part_cost: int,
) -> WorkShape: ...
def cuda_work_bytes(
    shape: WorkShape, num_seqs: int, max_tiles: int, max_runs: int, packed: PackedSize
) -> int: ...
def cuda_work(
    memory: int,
    partials: int,
    shape: WorkShape,
    num_seqs: int,
    max_tiles: int,
    max_runs: int,
    packed: PackedSize,
    grid: int,
    warps: int,
    stages: int,
) -> Work: ...
def cuda_share(
    work: Work,
    slots: int,
    rows: int,
    kept: int,
    own_rows: int,
    kept_rows: int,
    tile_tokens: int,
    of_groups: bool,
) -> Work: ...
def cuda_plan_work(plan: StepPlan, work: Work, stream: int) -> None: ...
def cuda_plan_shared(
    plan: StepPlan, work: Work, block_size: int, least_rows: int, least_saved: int, stream: int
) -> None: ...
def cuda_turn_rows(
    segments: int, num_segments: int, inv_freq: int, num_pairs: int, turns: int, stream: int
) -> None: ...
def cuda_write_kv(
    cache: PagedCache, k: HeadRows, v: HeadRows, slots: int, num_tokens: int, stream: int
) -> None: ...
def cuda_attend(call: Attention, work: Work, loop: int, exact: bool, overlap: bool, stream: int) -> None: ...
def cuda_join_shared(call: Attention, work: Work, stream: int) -> None: ...
def cuda_add_block_mass(call: Attention, work: Work, loop: int, exact: bool, stream: int) -> None: ...
def cuda_read_memory(data: int, bytes: int, sink: int, stream: int) -> None: ...
def cuda_copy_blocks(
    source: int,
    source_ids: int,
    target: int,
    target_ids: int,
    num_blocks: int,
    bytes_per_block: int,
    stream: int,
) -> None: ...
