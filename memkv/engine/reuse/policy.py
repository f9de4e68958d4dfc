"""What a policy is: for each question, which blocks of the mapped chunks are computed afresh.

The prefix is never asked about: it is exact wherever it is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class MappedChunk:
    """One retrieved chunk as a policy sees it, in prompt order.

    Attributes:
        context_exact: the chunk was prefilled behind exactly the tokens that stand before it in this prompt,
            so that mapping it equals computing it.
        follows: what stands right before it here is what stood right before it in its document.
    """

    num_tokens: int
    num_blocks: int
    context_exact: bool
    follows: bool = False


@dataclass(frozen=True, slots=True)
class LookRequest:
    """What a policy wants to know of the question's attention before it chooses.

    Attributes:
        layers: the part of the model's layers that counts, as fractions (first, last) of its depth.
        rows: how many of the tail's last tokens look; 0 is all of them.
    """

    layers: tuple[float, float] = (0.0, 1.0)
    rows: int = 0

    def layer_indices(self, num_layers: int) -> range:
        """At least one layer."""
        first = min(round(self.layers[0] * num_layers), num_layers - 1)
        return range(first, max(first + 1, round(self.layers[1] * num_layers)))


# Per chunk and block, softmax mass: each looking token hands out 1 in each head of each layer, to all that
# it sees; the mass of a block is what it got, summed over its tokens, the looking tokens, heads and layers.
BlockMass = Sequence[Sequence[float]]


class ReusePolicy(Protocol):
    """Policies derive from it for what they leave as it is."""

    @property
    def name(self) -> str: ...

    @property
    def look(self) -> LookRequest | None:
        """What it wants measured first: one pass of the tail over the prompt with every chunk mapped."""
        return None

    @property
    def reorders(self) -> bool:
        """Whether chunks may be put in the order that earlier requests' prompts had."""
        return False

    @property
    def maps_other_contexts(self) -> bool:
        """Whether it may map anything of a chunk whose context differs."""
        return True

    def max_fresh_blocks(self, mapped: Sequence[MappedChunk]) -> int:
        """No look can make it choose more blocks than that."""
        return sum(map(len, self.fresh_blocks(mapped)))

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        """Per chunk, the indices of its blocks to compute afresh, ascending.

        Args:
            look: what was measured, where the policy asks for it.
        """


@dataclass(frozen=True, slots=True)
class PolicyForm:
    """How a policy is written; its module's `FORM`.

    Attributes:
        pattern: "name" or "name:parameter".
        parse: makes the policy from the parameter, None where there is no colon; returns None where the
            parameter is not possible.
    """

    pattern: str
    parse: Callable[[str | None], ReusePolicy | None]

    @property
    def name(self) -> str:
        return self.pattern.partition(":")[0]


def blocks_by_mass(mapped: Sequence[MappedChunk], look: BlockMass) -> list[tuple[int, int]]:
    """(chunk, block) of chunks whose context differs, by falling mass; of equals the first in the prompt."""
    places = [
        (index, block)
        for index, chunk in enumerate(mapped)
        for block in range(chunk.num_blocks)
        if not chunk.context_exact
    ]
    return sorted(places, key=lambda place: -look[place[0]][place[1]])


def whole_number(text: str) -> int | None:
    """1 to 100,000 in plain digits."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        return None
    return int(text) if 1 <= int(text) <= 100_000 else None


def fraction(text: str) -> float | None:
    """Above 0, at most 1, in plain digits."""
    digits = text.replace(".", "", 1)
    if not (digits.isascii() and digits.isdigit() and len(text) < 20):
        return None
    return float(text) if 0 < float(text) <= 1 else None
