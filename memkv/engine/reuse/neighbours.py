"""`neighbours:n`: as `head:n`, but a chunk right behind the one that it follows in its document stays mapped.

What its first block would learn from is the end of that chunk; the rest of the prompt it has not seen either
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memkv.engine.reuse.policy import BlockMass, MappedChunk, PolicyForm, ReusePolicy, whole_number


@dataclass(frozen=True, slots=True)
class Neighbours(ReusePolicy):
    num_blocks: int = 1

    @property
    def name(self) -> str:
        return f"neighbours:{self.num_blocks}"

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        return [
            []
            if chunk.context_exact or chunk.follows
            else list(range(min(self.num_blocks, chunk.num_blocks)))
            for chunk in mapped
        ]


def _parse(parameter: str | None) -> Neighbours | None:
    if parameter is None:
        return Neighbours()
    count = whole_number(parameter)
    return None if count is None else Neighbours(count)


FORM = PolicyForm("neighbours:n", _parse)
