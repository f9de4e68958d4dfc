"""The compiled kernels, as `csrc/bindings/module.cpp` lists them.

Addresses are integers; dtype 0 is float32, 1 bfloat16; strides are in elements.
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
