"""`head:n`: the first n blocks of every chunk whose context differs, one unless said otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memkv.engine.reuse.policy import BlockMass, MappedChunk, PolicyForm, ReusePolicy, whole_number


@dataclass(frozen=True, slots=True)
class Head(ReusePolicy):
    num_blocks: int = 1

    @property
    def name(self) -> str:
        return f"head:{self.num_blocks}"

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        return [
            [] if chunk.context_exact else list(range(min(self.num_blocks, chunk.num_blocks)))
            for chunk in mapped
        ]


def _parse(parameter: str | None) -> Head | None:
    if parameter is None:
        return Head()
    count = whole_number(parameter)
    return None if count is None else Head(count)


FORM = PolicyForm("head:n", _parse)
