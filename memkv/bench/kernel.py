"""`memkv bench kernel`: the attention kernel against what memory gives and other kernels reach, in one run.

    ours     paged, blocks scattered at random at the stride of all layers, eight segments per sequence at
             unequal positions, queries rotated in the kernel, partials merged
    peers    the same attention over keys that somebody rotated and laid out in order before: torch's
             scaled_dot_product_attention; FlashInfer over paged keys, where it can be imported

Calls of one measurement read different memory, more than a cache holds: a call for each layer of the pool. On
a GPU they are one CUDA graph, and the figure is the median of its replays divided by its calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from memkv.bench.kernel_pool import CPU_SIZES, GPU_SIZES, Heads, Pool, Sizes
from memkv.errors import KernelArgumentError
from memkv.kernels import cuda, ops
from memkv.kernels.ops import AttentionPlan, Rotation

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One decode shape; times of one call."""

    shape: str  # batch x context
    heads: str  # query heads / kv heads / head_dim
    block_size: int
    segment_tokens: int
    kv_mib: float
    ours_us: float
    ours_unrotated_us: float
    read_tbs: float
    share_of_ceiling: float
    peers_us: dict[str, float]


@dataclass(slots=True)
class KernelBench:
    """What `bench kernel` found; the kept file has the same fields."""

    device: str
    versions: dict[str, str]
    source_hash: str = ""
    stale_reason: str = ""
    read_ceiling_tbs: float = 0.0
    copy_tbs: float = 0.0
    plan_us: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    block_sizes: dict[str, dict[str, float]] = field(default_factory=dict)
    segments: dict[str, float] = field(default_factory=dict)
    shared_chunk: dict[str, float] = field(default_factory=dict)
    many_query: list[dict[str, Any]] = field(default_factory=list)
    block_mass: dict[str, float] = field(default_factory=dict)


def run_kernel_bench(device: str, tell: Tell = lambda words: None, sizes: Sizes | None = None) -> KernelBench:
    """Measures the kernels of a device.

    Raises:
        KernelArgumentError: the device is not there, or the extension has no kernels for it.
    """
    target = torch.device(device)
    if target.type == "cuda" and not (torch.cuda.is_available() and cuda.built()):
        raise KernelArgumentError(
            "no CUDA device is visible, or the kernels were built without CUDA",
            hint="in the checkout: pip install --no-build-isolation -C cmake.define.MEMKV_CUDA=ON -e .",
        )
    return _Bench(target, tell, sizes or (GPU_SIZES if target.type == "cuda" else CPU_SIZES)).run()


class _Bench:
    def __init__(self, device: torch.device, tell: Tell, sizes: Sizes) -> None:
        self.device, self.tell, self.sizes = device, tell, sizes
        self.on_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if self.on_gpu else "CPU"
        self.found = KernelBench(device=name, versions=_versions(self.on_gpu))

    def run(self) -> KernelBench:
        torch.manual_seed(0)
        self._ceilings()
        heads = Heads()
        pool = self._pool(heads, 16, self.sizes.shapes)
        for batch, context in self.sizes.shapes:
            self._row(pool, batch, context)
        self._segments(pool)
        if self.on_gpu:
            self._shared_chunk(pool)
            self._block_mass(pool)
        if self.sizes.many_queries:
            self._many_queries(pool)
        del pool
        self._block_sizes(heads)
        for other in self.sizes.other_heads:
            shape = self.sizes.shapes[min(3, len(self.sizes.shapes) - 1)]
            self._row(self._pool(other, 16, [shape]), *shape)
        return self.found

    def _pool(self, heads: Heads, block_size: int, shapes: Sequence[tuple[int, int]]) -> Pool:
        """Four times what the shapes take, if there may be so much."""
        tokens = max(batch * context for batch, context in shapes)
        needed = tokens * heads.kv_heads * heads.head_dim * 4 * self.sizes.num_layers
        num_bytes = min(self.sizes.pool_bytes, 4 * needed)
        self.tell(f"filling a pool of {num_bytes >> 20} MiB, {heads}, block size {block_size}")
        return Pool(self.device, heads, block_size, num_bytes, self.sizes.num_layers)

    def _ceilings(self) -> None:
        self.tell("reading and copying memory")
        if not self.on_gpu:
            self.found.read_ceiling_tbs = ops.measure_read_bandwidth(self.sizes.pool_bytes) / 1e3
            return
        data = torch.empty(4 << 30, dtype=torch.uint8, device=self.device)
        data.random_(0, 255)
        other = torch.empty_like(data)
        size = data.numel()
        self.found.read_ceiling_tbs = size / self._time([partial(cuda.read_memory, data)]) / 1e6
        blocks = [x.view(-1, 1 << 20) for x in (data, other)]
        ways = (lambda: other.copy_(data), lambda: ops.copy_blocks(blocks[0], None, blocks[1], None))
        self.found.copy_tbs = 2 * size / min(self._time([way]) for way in ways) / 1e6

    def _row(self, pool: Pool, batch: int, context: int) -> None:
        heads = pool.heads
        self.tell(f"decode {batch}x{context}, {heads}")
        plan = pool.plan(batch, context)
        ours = self._time(self._calls(pool, plan, rotated=True))
        unrotated = self._time(self._calls(pool, plan, rotated=False))
        num_bytes = batch * context * heads.kv_heads * heads.head_dim * 4
        rate = num_bytes / ours / 1e6
        self.found.rows.append(
            Row(
                shape=f"{batch}x{context}",
                heads=str(heads),
                block_size=pool.block_size,
                segment_tokens=context // 8,
                kv_mib=num_bytes / 2**20,
                ours_us=ours,
                ours_unrotated_us=unrotated,
                read_tbs=rate,
                share_of_ceiling=rate / self.found.read_ceiling_tbs,
                peers_us=self._peers(heads, batch, context) if self.sizes.peers else {},
            )
        )
        if self.on_gpu:
            first = self._calls(pool, plan, rotated=True)[0]

            def plan_and_attend() -> None:
                plan.refresh()
                first()

            planned = self._time([plan_and_attend] * 8)
            self.found.plan_us[f"{batch}x{context}, {heads}"] = planned - self._time([first] * 8)

    def _calls(
        self, pool: Pool, plan: AttentionPlan, rotated: bool, **options: Any
    ) -> list[Callable[[], Any]]:
        heads = pool.heads
        shape = (plan.num_tokens, heads.num_heads, heads.head_dim)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        q = torch.randn(shape, device=self.device, dtype=dtype)
        rotation = self._rotation(heads) if rotated else None
        scale = heads.head_dim**-0.5
        return [
            partial(ops.paged_attention, q, *pool.layer(i), plan, rotation=rotation, scale=scale, **options)
            for i in range(pool.num_layers)
        ]

    def _rotation(self, heads: Heads) -> Rotation:
        exponents = torch.arange(0, heads.head_dim, 2, dtype=torch.float64, device=self.device)
        return Rotation(500_000.0 ** (-exponents / heads.head_dim))

    def _segments(self, pool: Pool) -> None:
        batch, context = self.sizes.shapes[min(3, len(self.sizes.shapes) - 1)]
        for name, tokens in (("one", context), ("eight", 0), ("of 256 tokens", 256), ("of 64 tokens", 64)):
            plan = pool.plan(batch, context, segment_tokens=tokens)
            self.found.segments[f"{batch}x{context}, {name}"] = self._time(
                self._calls(pool, plan, rotated=True)
            )

    def _shared_chunk(self, pool: Pool) -> None:
        """64 sequences over one chunk of 8,192 tokens, each at another position, against 64 chunks."""
        for name, shared in (("shared_us", True), ("distinct_us", False)):
            plan = pool.plan(64, 8192, shared=shared)
            self.found.shared_chunk[name] = self._time(self._calls(pool, plan, rotated=True))
        found = self.found.shared_chunk
        found["shared_over_distinct"] = found["shared_us"] / found["distinct_us"]

    def _block_mass(self, pool: Pool) -> None:
        for name, count, context in (("decode", 1, 131_072), ("question", 64, 32_768)):
            plan = pool.plan(1, context, query_positions=range(context - count, context))
            alone = self._time(self._calls(pool, plan, rotated=True)[:8])
            both = self._time(self._calls(pool, plan, rotated=True, block_mass=True)[:8])
            self.found.block_mass |= {f"{name}_us": alone, f"{name}_with_mass_us": both}
            self.found.block_mass[f"{name}_ratio"] = both / alone

    def _many_queries(self, pool: Pool) -> None:
        scattered = sorted(torch.randperm(32_768)[:3277].tolist())
        for name, context, positions in (
            ("64 question tokens on 32,768", 32_768, list(range(32_704, 32_768))),
            ("2,048 question tokens on 32,768", 32_768, list(range(30_720, 32_768))),
            ("3,277 tokens scattered over 32,768", 32_768, scattered),
            ("prefill of 2,048", 2048, list(range(2048))),
        ):
            self._many_query(pool, name, pool.plan(1, context, query_positions=positions))
            if self.sizes.peers and positions[-1] - positions[0] == len(positions) - 1:
                self.found.many_query[-1]["peers_us"] = self._many_peers(pool.heads, len(positions), context)
        chunks = pool.plan(1, 32_768, segment_tokens=512, query_positions=range(32_704, 32_768))
        self._many_query(pool, "64 question tokens on 64 chunks of 512", chunks)
        refreshed = pool.refreshed_plan(64, 512, 0.1)
        self._many_query(pool, "a tenth of the blocks of 64 chunks of 512, afresh", refreshed)

    def _many_query(self, pool: Pool, name: str, plan: AttentionPlan) -> None:
        self.tell(name)
        pairs = int((plan.query_position.long() + 1).sum())
        flop = 4 * pool.heads.num_heads * pool.heads.head_dim * pairs
        found: dict[str, Any] = {"name": name}
        for way, rotated in (("ours", True), ("ours_unrotated", False)):
            found[f"{way}_us"] = took = self._time(self._calls(pool, plan, rotated=rotated)[:4])
            found[f"{way}_tflops"] = flop / took / 1e6
        self.found.many_query.append(found)

    def _block_sizes(self, heads: Heads) -> None:
        shapes = self.sizes.shapes[:4]
        for size in (8, 16, 32):
            pool = self._pool(heads, size, shapes)
            for batch, context in shapes:
                name = f"{batch}x{context}"
                plan = pool.plan(batch, context)
                took = self._time(self._calls(pool, plan, rotated=True))
                self.found.block_sizes.setdefault(name, {})[str(size)] = took
            del pool

    def _peers(self, heads: Heads, batch: int, context: int) -> dict[str, float]:
        """torch's attention over contiguous keys, in the better of two forms; FlashInfer over pages."""
        num_bytes = batch * context * heads.kv_heads * heads.head_dim * 4
        count = max(2, min(32, self.sizes.pool_bytes // 64 // num_bytes))
        shape = (batch, heads.kv_heads, context, heads.head_dim)
        group = heads.num_heads // heads.kv_heads
        dtype = torch.bfloat16
        q = torch.randn(batch, heads.kv_heads, group, heads.head_dim, device=self.device, dtype=dtype)
        sets = [torch.randn(2, *shape, device=self.device, dtype=dtype).unbind() for _ in range(count)]
        found = {}
        by_head = q.view(batch, heads.num_heads, 1, heads.head_dim)
        for name, backend in self._backends():
            # The heads of a kv head as rows of one head, or as heads that share their keys.
            took = [
                self._time_or_none([partial(_sdpa, backend, form, k, v, None) for k, v in sets])
                for form in (q, by_head)
            ]
            if any(took):
                found[name] = min(one for one in took if one is not None)
        if self.on_gpu:
            found |= self._flashinfer(heads, batch, context, sets)
        return found

    def _backends(self) -> list[tuple[str, SDPBackend]]:
        if not self.on_gpu:
            return [("sdpa_contiguous", SDPBackend.FLASH_ATTENTION)]
        return [
            ("cudnn_contiguous", SDPBackend.CUDNN_ATTENTION),
            ("flash_contiguous", SDPBackend.FLASH_ATTENTION),
        ]

    def _many_peers(self, heads: Heads, num_tokens: int, context: int) -> dict[str, float]:
        shape = (1, heads.num_heads, context, heads.head_dim)  # each query head has keys of its own
        dtype = torch.bfloat16
        q = torch.randn(1, heads.num_heads, num_tokens, heads.head_dim, device=self.device, dtype=dtype)
        k, v = torch.randn(2, 1, heads.kv_heads, *shape[2:], device=self.device, dtype=dtype).unbind()
        bias = causal_lower_right(num_tokens, context)
        found = {}
        for name, backend in self._backends():
            took = self._time_or_none([partial(_sdpa, backend, q, k, v, bias)] * 4)
            if took is not None:
                found[name] = took
        return found

    def _flashinfer(
        self, heads: Heads, batch: int, context: int, sets: Sequence[tuple[Tensor, ...]]
    ) -> dict[str, float]:
        """FlashInfer's paged decode kernels, pages of 16 in random order; nothing where it cannot run."""
        if heads != Heads() or find_spec("flashinfer") is None:  # other heads it would have to compile
            return {}
        flashinfer: Any = import_module("flashinfer")
        page, pages = 16, batch * context // 16
        layout = {"num_qo_heads": heads.num_heads, "num_kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
        order = torch.randperm(pages, device=self.device, dtype=torch.int32)
        starts = torch.arange(batch + 1, device=self.device, dtype=torch.int32) * (context // page)
        last = torch.full((batch,), page, device=self.device, dtype=torch.int32)
        q = torch.randn(batch, heads.num_heads, heads.head_dim, device=self.device, dtype=torch.bfloat16)
        caches = [
            tuple(x.reshape(pages, heads.kv_heads, page, heads.head_dim) for x in of_set) for of_set in sets
        ]
        found = {}
        for name, tensor_cores, rope in (
            ("flashinfer", False, "NONE"),
            ("flashinfer_tensor_cores", True, "NONE"),
            ("flashinfer_rotating_keys", False, "ROPE_LLAMA"),
        ):
            workspace = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
            try:
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    workspace, "HND", use_tensor_cores=tensor_cores
                )
                wrapper.plan(
                    starts,
                    order,
                    last,
                    layout["num_qo_heads"],
                    layout["num_kv_heads"],
                    layout["head_dim"],
                    page,
                    pos_encoding_mode=rope,
                    q_data_type=torch.bfloat16,
                    kv_data_type=torch.bfloat16,
                )
                calls = [partial(wrapper.run, q, cache) for cache in caches]
                found[name] = self._time(calls)
            except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:  # a peer less
                self.tell(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        return found

    def _time_or_none(self, calls: Sequence[Callable[[], Any]]) -> float | None:
        try:
            return self._time(calls)
        except RuntimeError as error:  # a backend that does not take this shape
            self.tell(str(error).splitlines()[0])
            return None

    def _time(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Microseconds of one of the calls."""
        if not self.on_gpu:
            return 1e6 * statistics.median(_wall(calls) for _ in range(self.sizes.replays)) / len(calls)
        gpu: Any = torch.cuda  # its classes are not typed
        side = gpu.Stream()
        side.wait_stream(gpu.current_stream())
        with gpu.stream(side):
            for call in calls:
                call()
        gpu.current_stream().wait_stream(side)
        graph = gpu.CUDAGraph()
        with gpu.graph(graph):
            for call in calls:
                call()
        events = [[gpu.Event(enable_timing=True) for _ in range(2)] for _ in range(self.sizes.replays)]
        for _ in range(2):
            graph.replay()
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        gpu.synchronize()
        took: float = statistics.median(begin.elapsed_time(end) for begin, end in events)
        return 1e3 * took / len(calls)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, bias: Any) -> Tensor:
    with sdpa_kernel(backend):
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)


def _wall(calls: Sequence[Callable[[], Any]]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begin


def _versions(on_gpu: bool) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if on_gpu:
        cudnn: Any = torch.backends.cudnn
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn.version())}
    for name in ("flashinfer-python",):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
