"""What `memkv doctor` finds, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import rich_click as click

from memkv.cli.output import printable

State = Literal["ok", "warning", "failed"]

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        detail: what was found.
        fix: the command, or the sentence, that mends it; empty where nothing is to mend.
        mend: what `--fix` does about it, in one sentence once it is done; None where that is left to people.
    """

    name: str
    state: State
    detail: str
    fix: str = ""
    mend: partial[str] | None = None


def print_findings(findings: Sequence[Finding]) -> None:
    """A line for each, and below it how to mend it."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, colour = _MARKS[finding.state]
        click.echo(f"{click.style(mark, fg=colour)} {finding.name.ljust(width)}  {printable(finding.detail)}")
        if finding.fix:
            click.echo(f"{' ' * (width + 4)}{click.style('fix:', bold=True)} {printable(finding.fix)}")
