"""The README's fenced blocks, as what a reader would type and what he would see."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d.,]*")


@dataclass(slots=True)
class Step:
    """One command and the lines that the README shows behind it; `...` stands for anything."""

    command: str
    shown: list[str] = field(default_factory=list)

    def matches(self, output: str) -> bool:
        """Whether `output` is what is shown; figures on lines with a time may differ."""
        pattern = r"\n".join(_pattern(line) for line in self.shown)
        return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in _FENCE.findall(text) if found == language]


def steps(block: str) -> list[Step]:
    found: list[Step] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(Step(line[2:]))
        else:
            found[-1].shown.append(line)
    return found


def _pattern(line: str) -> str:
    if line == "...":
        return ".*"
    pieces = [re.escape(piece) for piece in line.split("...")]
    if " ms" in line:
        pieces = [_NUMBER.sub(r"[\\d.,]+", piece) for piece in pieces]
    return ".*".join(pieces)
