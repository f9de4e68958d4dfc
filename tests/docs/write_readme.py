"""Writes what is generated of README.md and of the kept evaluations' page; a test compares.

    python tests/docs/write_readme.py

Each stands between `<!-- made by tests/docs/write_readme.py: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import engine_tables
import quality_tables

from memkv.cli import main
from memkv.cli.settings import MEANING, variable_of
from memkv.config import Config
from memkv.store import block_file

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MEASURED = ROOT / "tests" / "bench" / "results" / "compare-smollm2.json"
FAULTS = ROOT / "tests" / "faults" / "results.json"
PAGES = (README, quality_tables.RESULTS / "README.md")

_PART = re.compile(r"(<!-- made by tests/docs/write_readme\.py: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WAYS = {
    "off": "everything computed",
    "exact": "prefix and first chunk mapped; the same answer as `off`",
    "head": "all chunks mapped, the first block of each later one computed",
    "map": "all chunks mapped",
}


def headline() -> str:
    """The one number of the first screen."""
    found = _measured()
    shape, ttft, times = found["shape"], found["ttft_ms"], found["speedup"]
    return (
        f"On {found['cpu']}, with {_model_text(found)} and {shape['chunks']} retrieved chunks of "
        f"{shape['chunk_tokens']} tokens, the first token of the answer comes after **{ttft['map']:.0f} ms "
        f"instead of {ttft['off']:.0f} ms** when all chunks are mapped, {times['map']:.0f} times sooner, and "
        f"{times['head']:.0f} times sooner when one block of each is computed afresh. Both are "
        f"approximations: [what reuse costs](#what-reuse-costs).\n"
    )


def speed() -> str:
    """The whole comparison."""
    found = _measured()
    computed = found["prefilled_tokens"]
    ways = [
        f"| `{way}` | {_WAYS[way]} | {computed[way]} | {ttft:.0f} ms | {found['speedup'][way]:.1f} x |"
        for way, ttft in found["ttft_ms"].items()
    ]
    rates = [
        ("the CPU attention kernel reads KV, more than the cache holds", "kernel_read_gbs", "GB/s"),
        ("the machine reads memory", "machine_read_gbs", "GB/s"),
        ("ingest, from text to blocks on disk", "ingest_tokens_per_s", "tokens/s"),
        ("transformers' own forward pass, same ids, threads, batch", "model_tokens_per_s", "tokens/s"),
        ("decode, one sequence", "decode_tokens_per_s", "tokens/s"),
    ]
    lines = [
        f"{found['cpu']}, torch on {found['threads']['torch']} and the kernels on "
        f"{found['threads']['kernels']} threads, as measured at the start, {_model_text(found)}, KV in "
        f"{found['kv_dtype']}, blocks of {found['shape']['block_size']} tokens, resident, with retrieval, "
        f"{found['shape']['question_tokens']} question tokens and the chat template behind them; medians of "
        f"{found['shape']['rounds']}.",
        "",
        "| reuse | | tokens computed | first token | sooner |",
        "| --- | --- | --: | --: | --: |",
        *ways,
        "",
        "| in the same run | |",
        "| --- | --: |",
        *(f"| {name} | {found[key]:.{1 if unit == 'GB/s' else 0}f} {unit} |" for name, key, unit in rates),
        "",
    ]
    return "\n".join(lines)


def configuration() -> str:
    """Every key, its default and its variable."""
    rows = [
        f"| `{key}` | `{_default(value)}` | `{variable_of(key)}` | {MEANING[key]} |"
        for key, value, _ in Config().items()
    ]
    return "\n".join(["| key | default | variable | |", "| --- | --- | --- | --- |", *rows, ""])


def commands() -> str:
    """Every command with its options."""
    return "\n".join(line for path, command in _leaves(main, "memkv") for line in _command(path, command))


def block_format() -> str:
    """The layout that the store's own docstring draws."""
    drawing = (block_file.__doc__ or "").split("\n\n")[1]
    return f"```\n{drawing}\n```\n"


def faults() -> str:
    """The kept results of the fault campaign, a figure with all its parts a line."""
    results = json.loads(FAULTS.read_text())
    rows = []
    for figure in dict.fromkeys(each["figure"].partition(":")[0] for each in results):
        parts = [each for each in results if each["figure"].partition(":")[0] == figure and "runs" in each]
        of = [[each for each in parts if each["database"] == name] for name in ("sqlite", "postgresql")]
        cells = [
            f"{sum(each['runs'] for each in some):,} | {sum(each['violations'] for each in some)}"
            if some
            else " | "
            for some in of
        ]
        controls = [seen for each in parts for seen in each["controls"].values()]
        noticed = f"{sum(controls)} of {len(controls)}"
        rows.append(f"| {figure} | {' | '.join(cells)} | {noticed} |")
    return "\n".join(
        [
            "| | SQLite: runs | violations | PostgreSQL: runs | violations | controls noticed |",
            "| --- | --: | --: | --: | --: | --: |",
            *rows,
            "",
            *_in_strides(results),
        ]
    )


def _in_strides(results: list[dict[str, Any]]) -> list[str]:
    """Which figures did not try every call."""
    found: dict[tuple[str, int], list[str]] = {}
    for each in results:
        if stride := each["sizes"].get("stride", 0):
            found.setdefault((each["database"], stride), []).append(each["figure"].rpartition(": ")[2])
    names = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
    lines = [
        f"On {names[database]} one call in {stride} was tried of: {', '.join(pieces)}."
        for (database, stride), pieces in found.items()
    ]
    return ["\n".join(lines), ""] if lines else []


PARTS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "speed": speed,
    "engine": engine_tables.engine,
    "quality": quality_tables.real_questions,
    "quality-needles": quality_tables.needles,
    "quality-gate": quality_tables.gated,
    "quality-stored": quality_tables.stored,
    "quality-options": quality_tables.options,
    "configuration": configuration,
    "commands": commands,
    "block-file": block_format,
    "faults": faults,
}


def rendered(text: str) -> str:
    """`text` with its generated parts made anew."""
    return _PART.sub(lambda part: part[1] + PARTS[part[2]]() + part[3], text)


def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))["comparison"]
    return found


def _model_text(found: dict[str, Any]) -> str:
    return {"smollm2-135m-instruct": "SmolLM2-135M-Instruct"}.get(found["model"], str(found["model"]))


def _default(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


def _leaves(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _leaves(command.commands[name], f"{path} {name}")
    else:
        yield path, command


def _command(path: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    yield f"**`{path}{f' {usage}' if usage else ''}`** {' '.join((command.help or '').split())}\n"
    own = [parameter for parameter in command.params if parameter.name not in _SHARED]
    records = [record for parameter in own if (record := parameter.get_help_record(context)) and record[1]]
    for name, meaning in records:
        yield f"- `{name}` {' '.join(meaning.split())}"
    names = {parameter.name for parameter in command.params}
    shared = [title for title, members in _SETS.items() if members <= names]
    if shared:
        yield f"- {' and '.join(shared)} options"
    yield ""


# Options that many commands share are listed once, in the README's own words.
_SETS = {
    "*server*": {"url", "api_key"},
    "*embedded*": {"data_dir", "model", "embedder", "file"},
    "*output*": {"output_format", "quiet"},
}
_SHARED = set().union(*_SETS.values())

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
