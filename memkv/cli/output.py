"""What a command prints: results on stdout as a table or as JSON, everything else on stderr."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import rich_click as click

# Control characters of untrusted text would be obeyed by a terminal. Tab and newline stay.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Output:
    """How results are shown.

    Attributes:
        format: "table" for people, "json" for programs.
        quiet: results only: no progress, no notes.
    """

    format: str = "table"
    quiet: bool = False

    @property
    def is_json(self) -> bool:
        return self.format == "json"

    def note(self, text: str) -> None:
        """A line for people, on stderr."""
        if not self.quiet:
            click.echo(printable(text), err=True)

    def json(self, value: object) -> None:
        """`value` (structs, dataclasses, lists, dicts) as indented JSON."""
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())

    def rows(self, value: object, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """`value` as JSON, or `rows` under `columns`."""
        if self.is_json:
            self.json(value)
        else:
            click.echo(table(columns, rows))

    def fields(self, value: object, pairs: Sequence[tuple[str, object]]) -> None:
        """`value` as JSON, or one `name  value` line for each of `pairs`."""
        if self.is_json:
            self.json(value)
            return
        width = max((len(name) for name, _ in pairs), default=0)
        for name, item in pairs:
            click.echo(f"{click.style(name.ljust(width), bold=True)}  {printable(str(item))}")


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command `--format` and `--quiet`; they arrive as its `out` argument."""

    @click.option(
        "--format",
        "output_format",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="How results are printed.",
    )
    @click.option("-q", "--quiet", is_flag=True, help="Results only: no progress and no notes.")
    @click.pass_context
    @functools.wraps(command)
    def with_output(
        ctx: click.Context, /, *args: Any, output_format: str, quiet: bool, **options: Any
    ) -> object:
        quiet = quiet or bool(ctx.find_root().params.get("quiet"))
        return command(*args, out=Output(output_format, quiet), **options)

    return with_output


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns, nothing cut; numbers to the right."""
    cells = [[printable(_one_line(value)) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]

    def align(line: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(line, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([click.style(align(columns), bold=True), *map(align, cells)])


def printable(text: str) -> str:
    """`text` without the control characters that a terminal would obey."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def bytes_text(count: float) -> str:
    """Bytes for people: 12345678 -> "12.3 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(count: int, noun: str) -> str:
    """A count and what it counts, for nouns that take an s: "1 chunk", "2 chunks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def stderr_is_terminal() -> bool:
    return sys.stderr.isatty()


def _one_line(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return " ".join(str(value).split())
