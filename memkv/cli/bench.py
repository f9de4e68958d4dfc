"""`memkv bench compare` and `memkv bench kernel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.log import log_warnings_to_stderr
from memkv.cli.output import Output, output_options, table
from memkv.cli.progress import steps
from memkv.cli.target import Target, embedded_options

if TYPE_CHECKING:
    from memkv.bench.compare import Comparison
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

        found = run_comparison(target.config(), Shape(rounds=rounds), tell, keep_on_disk_of=_disk(target))
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


def _disk(target: Target) -> str | None:
    chosen = target.flags["store.data_dir"]
    return None if chosen is None else str(chosen)


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
