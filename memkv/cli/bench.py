"""`memkv bench compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.log import log_warnings_to_stderr
from memkv.cli.output import Output, output_options, table
from memkv.cli.progress import steps
from memkv.cli.target import Target, embedded_options

if TYPE_CHECKING:
    from memkv.bench.compare import Comparison


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
