"""`memkv bench load`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from memkv.cli.log import log_warnings_to_stderr
from memkv.cli.output import Output, output_options, table
from memkv.cli.progress import steps
from memkv.cli.target import Target, embedded_options

if TYPE_CHECKING:
    from memkv.bench.load import LoadBench


shape_option = click.option(
    "--shape",
    type=click.Choice(["llama-3.1-8b", "tiny"]),
    default=None,
    help="Random weights of this shape in the place of the model.",
)


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@shape_option
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="How much of the trace, from its beginning.",
)
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    default=(1.0,),
    show_default=True,
    help="How much faster than in the trace; may be repeated.",
)
@click.option(
    "--policy",
    "policies",
    metavar="NAME",
    multiple=True,
    default=("exact", "map"),
    show_default=True,
    help="What to reuse with; may be repeated.",
)
@click.option(
    "--ttft",
    type=click.FloatRange(0, min_open=True),
    default=2000.0,
    show_default=True,
    help="Objective: milliseconds to the first token.",
)
@click.option(
    "--itl",
    type=click.FloatRange(0, min_open=True),
    default=100.0,
    show_default=True,
    help="Objective: milliseconds between two tokens of an answer, on average.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds behind the last request after which what is not finished is cut off.",
)
@embedded_options
@output_options
def load(
    trace: Path,
    shape: str | None,
    seconds: float,
    rates: tuple[float, ...],
    policies: tuple[str, ...],
    ttft: float,
    itl: float,
    grace: float,
    target: Target,
    out: Output,
) -> None:
    """Replay the requests of TRACE, as JSON lines, without reuse and with each policy.

    A line is {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}: each id
    but the last is a chunk of 512 tokens, the last one the question. Reported are the requests a second that
    meet both objectives, and times. 64 chunks of random tokens on disk stand for all; each id is loaded and
    held by itself. Works in a temporary directory, inside --data-dir where that is given.
    """
    log_warnings_to_stderr()
    with steps(out) as tell:
        tell("loading the model")
        from memkv.bench.load import LoadSizes, Objectives, run_load_bench
        from memkv.bench.random_model import random_model
        from memkv.bench.trace import read_trace
        from memkv.engine.limits import host_bytes
        from memkv.memory.parts import choose_device, load_language_model

        requests = read_trace(trace, seconds)
        config = target.config()
        device, dtype = choose_device(config)
        model = load_language_model(config) if shape is None else random_model(shape, dtype, device)
        sizes = LoadSizes(
            rates=rates,
            policies=policies,
            objectives=Objectives(ttft_ms=ttft, itl_ms=itl),
            grace_seconds=grace,
        )
        engine = replace(config.engine, host_bytes=host_bytes(config.engine, [device]))
        found = run_load_bench(model, config.kv.dtype, engine, requests, sizes, target.chosen_dir, tell)
    if out.is_json:
        out.json(found)
    else:
        click.echo(_text(found))


def _text(found: LoadBench) -> str:
    rows = [
        (
            f"{row.rate:g}",
            row.policy,
            f"{row.goodput:.2f}",
            f"{row.good_share:.0%}",
            f"{row.finished} of {row.requests}",
            f"{row.ttft_p50_ms:.0f}",
            f"{row.ttft_p99_ms:.0f}",
            f"{row.itl_p50_ms:.1f}",
            f"{row.itl_p99_ms:.1f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.cached_share:.0%}",
        )
        for row in found.load
    ]
    columns = (
        "rate",
        "reuse",
        "good a second",
        "good",
        "finished",
        "first token p50 ms",
        "p99",
        "between tokens p50 ms",
        "p99",
        "tokens/s",
        "mapped",
    )
    left_out = f"; {found.left_out} requests longer than its context left out" if found.left_out else ""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    about = f"{found.model}, {found.dtype}, KV in {found.kv_dtype}{left_out}; {found.device}\n{versions}"
    return f"{table(columns, rows)}\n\n{about}"
