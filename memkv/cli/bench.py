"""`memkv bench compare`, `memkv bench kernel`, `memkv bench engine` and `memkv bench load`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.bench_load import load, shape_option
from memkv.cli.log import log_warnings_to_stderr
from memkv.cli.output import Output, output_options, table
from memkv.cli.progress import steps
from memkv.cli.target import Target, embedded_options

if TYPE_CHECKING:
    from memkv.bench.compare import Comparison
    from memkv.bench.engine import EngineBench, FirstToken
    from memkv.bench.kernel import KernelBench


@click.group()
def bench() -> None:
    """Measured speed on this machine."""


@bench.command()
@click.option(
    "--rounds", type=click.IntRange(1, 99), default=5, show_default=True, help="Medians are of so many."
)
@embedded_options
@output_options
def compare(rounds: int, target: Target, out: Output) -> None:
    """Time to the first token with and without reuse, bandwidths, and tokens per second, in one run.

    8 chunks of 256 tokens, 32 question tokens, blocks resident, retrieval included. Works in a temporary
    directory, inside --data-dir where that is given.
    """
    log_warnings_to_stderr()
    with steps(out) as tell:
        tell("loading the models")
        from memkv.bench.compare import Shape, run_comparison

        found = run_comparison(target.config(), Shape(rounds=rounds), tell, keep_on_disk_of=target.chosen_dir)
    if out.is_json:
        out.json(found)
    else:
        click.echo(_text(found))


@bench.command()
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default=None,
    help="Where to measure; a GPU where there is one.",
)
@output_options
def kernel(device: str | None, out: Output) -> None:
    """The attention kernel against what memory gives and what other kernels reach, in one run.

    Decode over scattered blocks in segments that stand elsewhere than where they were stored; contiguous
    attention of torch, and FlashInfer where it is installed, beside it; block sizes; many queries.
    """
    with steps(out) as tell:
        tell("loading torch")
        import torch

        from memkv.bench.kernel import run_kernel_bench

        found = run_kernel_bench(device or ("cuda" if torch.cuda.is_available() else "cpu"), tell)
    if out.is_json:
        out.json(found)
    else:
        click.echo(_kernel_text(found))


@bench.command()
@shape_option
@click.option(
    "--rounds", type=click.IntRange(1, 99), default=None, help="Medians are of so many; 5, on a CPU 3."
)
@embedded_options
@output_options
def engine(shape: str | None, rounds: int | None, target: Target, out: Output) -> None:
    """First tokens by context, policy and tier, decode by batch, ingest: an engine against its peers.

    From the request to the token on the host, without retrieval. Beside it a full prefill by the same engine,
    transformers, for decode its continuous batching too, and what memory and disk give, all in one run.
    Stages, to scale: q queued, l loading chunks (or handing their copies to the device), k looking, c
    computing. Where chunks come from host memory or disk, a timeline shows what overlaps. Contexts go up to
    128k tokens on a GPU, 1k elsewhere. Works in a temporary directory, inside --data-dir where that is given.
    """
    log_warnings_to_stderr()
    with steps(out) as tell:
        tell("loading the model")
        import msgspec

        from memkv.bench.engine import CPU_SIZES, Sizes, run_engine_bench
        from memkv.bench.random_model import random_model
        from memkv.memory.parts import choose_device, load_language_model

        config = target.config()
        device, dtype = choose_device(config)
        model = load_language_model(config) if shape is None else random_model(shape, dtype, device)
        sizes = Sizes() if device.startswith("cuda") else CPU_SIZES
        if rounds is not None:
            sizes = msgspec.structs.replace(sizes, rounds=rounds)
        found = run_engine_bench(model, config.kv.dtype, sizes, target.chosen_dir, tell)
    if out.is_json:
        out.json(found)
    else:
        click.echo(_engine_text(found))


bench.add_command(load)


def _stages(row: FirstToken, width: int = 30) -> str:
    """How a first token's time was spent, to scale: q queued, l loading, k looking, c computing."""
    stages = {"q": row.queue_ms, "l": row.load_ms, "k": row.look_ms, "c": row.prefill_ms}
    ends = [round(width * end / row.ms) for end in itertools.accumulate(stages.values())]
    return "".join(name * (end - start) for name, start, end in zip(stages, [0, *ends], ends, strict=False))


def _engine_text(found: EngineBench) -> str:
    from memkv.bench.timeline import drawn

    first = [
        (
            row.context,
            row.policy,
            row.tier,
            row.computed_tokens,
            f"{row.ms:.1f}",
            f"{row.full_prefill_ms / row.ms:.1f}",
            _stages(row),
        )
        for row in found.ttft
    ]
    full = [
        (row.context, f"{row.full_prefill_ms:.1f}", f"{row.transformers_ms:.1f}")
        for row in found.ttft
        if row.policy == "off"
    ]
    peers = sorted({name for row in found.decode for name in row.peers_ms})
    decode = [
        (
            row.batch,
            row.context,
            f"{row.ms:.2f}",
            f"{row.floor_ms:.2f}",
            *(f"{row.peers_ms[name]:.2f}" if name in row.peers_ms else "" for name in peers),
        )
        for row in found.decode
    ]
    failed = [
        f"batch {row.batch}, {name}: {why}" for row in found.decode for name, why in row.peers_failed.items()
    ]
    rates = [
        ("the device reads its memory", f"{found.read_gbs:.1f} GB/s"),
        ("chunks from host memory", f"{found.host_load_gbs:.1f} GB/s"),
        ("one large copy from there", f"{found.host_link_gbs:.1f} GB/s"),
        ("chunks from disk, verified", f"{found.disk_load_gbs:.1f} GB/s"),
        ("a plain read of their files", f"{found.disk_read_gbs:.1f} GB/s"),
        ("verification, of those loads", f"{found.disk_verify_share:.1%}"),
        ("a plain write, synced", f"{found.disk_write_gbs:.1f} GB/s"),
        ("ingest", f"{found.ingest_tokens_per_s:.0f} tokens/s"),
        ("transformers' forward pass", f"{found.forward_tokens_per_s:.0f} tokens/s"),
    ]
    columns = ("context", "policy", "tier", "computed tokens", "first token ms", "times sooner", "stages")
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return "\n\n".join(
        (
            table(columns, first),
            table(("context", "full prefill ms", "transformers ms"), full),
            *map(drawn, found.timeline),
            table(("batch", "context", "token ms", "floor ms", *peers), decode),
            *failed,
            table(("rate", "measured"), rates),
            f"{found.model}, {found.dtype}, KV in {found.kv_dtype}; {found.device}\n{versions}",
        )
    )


def _kernel_text(found: KernelBench) -> str:
    peers = sorted({name for row in found.rows for name in row.peers_us})
    rows = [
        (
            row.shape,
            row.heads,
            f"{row.kv_mib:.0f}",
            f"{row.ours_us:.1f}",
            f"{row.ours_unrotated_us:.1f}",
            f"{row.share_of_ceiling:.0%}",
            *(f"{row.peers_us[name]:.1f}" if name in row.peers_us else "" for name in peers),
        )
        for row in found.rows
    ]
    columns = ("batch x context", "heads", "KV MiB", "us", "unrotated", "of reading", *peers)
    parts = [table(columns, rows)]
    sizes = sorted({size for of_shape in found.block_sizes.values() for size in of_shape}, key=int)
    if sizes:
        by_size = [
            (shape, *(f"{of_shape[size]:.1f}" for size in sizes))
            for shape, of_shape in found.block_sizes.items()
        ]
        parts.append(table(("batch x context, us", *(f"block size {size}" for size in sizes)), by_size))
    if found.many_query:
        many = [
            (one["name"], f"{one['ours_us']:.0f}", f"{one['ours_tflops']:.0f}") for one in found.many_query
        ]
        parts.append(table(("many queries", "us", "TFLOP/s"), many))
    rates = [("reads", f"{1e3 * found.read_ceiling_tbs:.0f} GB/s")]
    if found.copy_tbs:
        rates.append(("copies", f"{1e3 * found.copy_tbs:.0f} GB/s"))
    parts.append(table(("memory", "measured"), rates))
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return "\n\n".join((*parts, f"{found.device}; {versions}"))


def _text(found: Comparison) -> str:
    ways = [
        (
            way,
            found.prefilled_tokens[way],
            f"{ttft:.1f}",
            f"{found.ttft_ms['off'] / ttft:.1f}",
        )
        for way, ttft in found.ttft_ms.items()
    ]
    rates = [
        ("attention kernel reads", f"{found.kernel_read_gbs:.1f} GB/s"),
        ("machine reads", f"{found.machine_read_gbs:.1f} GB/s"),
        ("ingest", f"{found.ingest_tokens_per_s:.0f} tokens/s"),
        ("transformers' forward pass", f"{found.model_tokens_per_s:.0f} tokens/s"),
        ("decode", f"{found.decode_tokens_per_s:.1f} tokens/s"),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    threads = ", ".join(f"{name} {count}" for name, count in found.threads.items())
    return "\n\n".join(
        (
            table(("reuse", "prefilled tokens", "first token ms", "times sooner"), ways),
            table(("rate", "measured"), rates),
            f"{found.cpu}; threads: {threads}\n{versions}",
        )
    )
