"""Where each part of a prompt stands: mapped from a chunk, or computed in private blocks.

    prompt      | prefix | chunk A      | chunk B                    | chunk C   | tail  | answer ...
    policy        mapped   mapped, exact  first two blocks fresh       all fresh
    pieces      [ mapped ][ mapped      ][ mapped, fresh ((0, 2),)  ][ private            ──► grows ]

What is fresh throughout is never mapped, so it is neither loaded nor pinned; its tokens and the tail's share
one private run. With `reuse = off` that run is the whole prompt.

A policy that looks first gets two placements: every chunk mapped, with private blocks for the worst choice;
and, when the look is over, the one that it chose, within those blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import BlockMass, LookRequest, MappedChunk
from memkv.kv.block_table import BlockTable, Segment


@dataclass(frozen=True, slots=True)
class MappedPiece:
    """A chunk at its place. `fresh`: runs (first block, number of blocks) to replace, ascending."""

    ref: ChunkRef
    position: int
    fresh: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.ref.num_tokens


@dataclass(frozen=True, slots=True)
class PrivatePiece:
    """Prompt tokens that are computed in blocks of their own."""

    position: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Pieces in order of position; the last is private and takes the answer's tokens too.

    Attributes:
        refs: the chunks to pin, each once.
        num_fresh_blocks: private blocks that the prompt needs.
        num_private_blocks: those, and the ones that the longest answer will need, and, before a look, the
            ones that it may choose.
        look: what is to be measured before the policy chooses; None where it has chosen.
    """

    block_size: int
    pieces: tuple[MappedPiece | PrivatePiece, ...]
    refs: tuple[ChunkRef, ...]
    num_fresh_blocks: int
    num_private_blocks: int
    look: LookRequest | None = None

    @property
    def num_mapped_blocks(self) -> int:
        """Blocks of all the chunks to pin."""
        return sum(_blocks(ref.num_tokens, self.block_size) for ref in self.refs)

    def table(
        self, chunks: Mapping[str, Sequence[int]], private: Sequence[int]
    ) -> tuple[BlockTable, list[int]]:
        """The block table of the prompt, and the private blocks that are left for the answer.

        Args:
            chunks: input key -> blocks, of every ref.
            private: `num_private_blocks` ids.
        """
        table = BlockTable(self.block_size)
        left = list(reversed(private))  # a stack
        for piece in self.pieces:
            if isinstance(piece, PrivatePiece):
                blocks = _pop(left, _blocks(piece.num_tokens, self.block_size))
                table.append(Segment(blocks, piece.num_tokens, piece.position, piece.position, private=True))
                continue
            index = len(table.segments)
            ref = piece.ref
            table.append(
                Segment(tuple(chunks[ref.input_key]), ref.num_tokens, piece.position, ref.stored_position)
            )
            for first, count in reversed(piece.fresh):  # from the end: what is before stays segment `index`
                table.replace(index, first, _pop(left, count))
        return table, left[::-1]


def place(request: GenerateRequest, look: BlockMass | None = None) -> Placement:
    """Asks the request's policy and lays the prompt out.

    Args:
        look: what the policy's look has measured; without it, a policy that looks gets its looking pass.
    """
    size = request.block_size
    choice = _choose(request, look)
    pieces: list[MappedPiece | PrivatePiece] = []
    refs: dict[str, ChunkRef] = {}
    position = private_start = num_fresh = 0
    for ref, indices in zip((request.prefix, *request.chunks), choice.fresh, strict=True):
        end = position + ref.num_tokens
        if len(indices) < _blocks(ref.num_tokens, size):
            if private_start < position:
                pieces.append(PrivatePiece(private_start, position - private_start))
            pieces.append(MappedPiece(ref, position, _runs(indices)))
            refs.setdefault(ref.input_key, ref)
            num_fresh += len(indices)
            private_start = end
        position = end
    last = PrivatePiece(private_start, request.prompt_tokens - private_start)
    pieces.append(last)
    num_fresh += sum(_blocks(piece.num_tokens, size) for piece in pieces if isinstance(piece, PrivatePiece))
    # the last token of an answer is never fed back, so its key needs no slot
    longest = last.num_tokens + request.sampling.max_tokens - 1
    growth = _blocks(longest, size) - _blocks(last.num_tokens, size)
    most = num_fresh + growth + choice.undecided
    return Placement(size, tuple(pieces), tuple(refs.values()), num_fresh, most, choice.look)


@dataclass(frozen=True, slots=True)
class _Choice:
    """`fresh`: of the prefix and each chunk, the blocks to compute. `undecided`: how many a look may add."""

    fresh: list[list[int]]
    look: LookRequest | None = None
    undecided: int = 0


def _choose(request: GenerateRequest, look: BlockMass | None) -> _Choice:
    size = request.block_size
    everything = (request.prefix, *request.chunks)
    if request.reuse == "off":
        return _Choice([list(range(_blocks(ref.num_tokens, size))) for ref in everything])
    mapped = []
    before = request.prefix.token_ids
    for ref in request.chunks:
        blocks = _blocks(ref.num_tokens, size)
        mapped.append(MappedChunk(ref.num_tokens, blocks, context_exact=ref.context_ids == before))
        before += ref.token_ids
    policy = request.policy
    most = policy.max_fresh_blocks(mapped) if policy.look is not None else 0
    if most and look is None:
        return _Choice([[] for _ in everything], policy.look, most)
    fresh = policy.fresh_blocks(mapped, look)
    assert len(fresh) == len(mapped) and all(
        list(indices) == sorted(set(indices) & set(range(chunk.num_blocks)))
        for indices, chunk in zip(fresh, mapped, strict=True)
    ), "bug: a policy named blocks that are not there, or not in order"
    assert look is None or sum(map(len, fresh)) <= most, "bug: a policy named more blocks than it said"
    return _Choice([[], *fresh])


def _runs(indices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending indices as runs (first, count)."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return tuple(runs)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _pop(stack: list[int], count: int) -> tuple[int, ...]:
    return tuple(stack.pop() for _ in range(count))
