"""Which blocks of the mapped chunks are computed afresh for a question.

The prefix is never asked about: it is exact wherever it is mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from memkv.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class MappedChunk:
    """One retrieved chunk as a policy sees it, in prompt order.

    `context_exact`: the chunk was prefilled behind exactly the tokens that stand before it in this prompt,
    so that mapping it equals computing it.
    """

    num_tokens: int
    num_blocks: int
    context_exact: bool


class ReusePolicy(Protocol):
    @property
    def name(self) -> str: ...

    def fresh_blocks(self, mapped: Sequence[MappedChunk]) -> list[list[int]]:
        """Per chunk, the indices of its blocks to compute afresh, ascending."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Everything whose context differs: the answer equals a full prefill's."""

    name: str = "exact"

    def fresh_blocks(self, mapped: Sequence[MappedChunk]) -> list[list[int]]:
        return [[] if chunk.context_exact else list(range(chunk.num_blocks)) for chunk in mapped]


@dataclass(frozen=True, slots=True)
class Map:
    """Nothing: every chunk as it was prefilled."""

    name: str = "map"

    def fresh_blocks(self, mapped: Sequence[MappedChunk]) -> list[list[int]]:
        return [[] for _ in mapped]


@dataclass(frozen=True, slots=True)
class Head:
    """The first `num_blocks` blocks of every chunk whose context differs."""

    num_blocks: int = 1

    @property
    def name(self) -> str:
        return f"head:{self.num_blocks}"

    def fresh_blocks(self, mapped: Sequence[MappedChunk]) -> list[list[int]]:
        return [
            [] if chunk.context_exact else list(range(min(self.num_blocks, chunk.num_blocks)))
            for chunk in mapped
        ]


def parse_policy(text: str) -> ReusePolicy:
    """`exact`, `map`, `head` (one block) or `head:n`. Raises `BadRequestError`."""
    name, colon, count = text.partition(":")
    if name == "exact" and not colon:
        return Exact()
    if name == "map" and not colon:
        return Map()
    if name == "head" and not colon:
        return Head()
    if name == "head" and count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= 100_000:
        return Head(int(count[:9]))
    raise BadRequestError(f"unknown reuse policy {text!r}", hint="exact, map, head or head:n with n >= 1")
