"""Where each part of a prompt stands: mapped from a chunk, or computed in private blocks.

    prompt      | prefix | chunk A      | chunk B                    | chunk C | text | tail | answer ...
    policy        mapped   mapped, exact  first two blocks fresh       all fresh
    pieces      [ mapped ][ mapped      ][ mapped, fresh ((0, 2),)  ][ private              ──► grows ]

What is fresh throughout is never mapped, so it is neither loaded nor pinned; its tokens, those of texts
beside it and the tail's share one private run. With `reuse = off` that run is the whole prompt.

A policy that looks first gets two placements: every chunk mapped, with private blocks for the worst choice;
and, when the look is over, the one that it chose, within those blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memkv.engine.request import GenerateRequest, piece_ids
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import BlockMass, LookRequest, MappedChunk
from memkv.kv.block_table import BlockTable, Segment


@dataclass(frozen=True, slots=True)
class MappedPiece:
    """The first `num_tokens` of a chunk at their place.

    Attributes:
        exact: the chunk was computed behind exactly what stands before it here.
        fresh: runs (first block, number of blocks) to replace, ascending.
    """

    ref: ChunkRef
    position: int
    num_tokens: int
    exact: bool
    fresh: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.position + self.num_tokens

    def segment(
        self, blocks: tuple[int, ...], first: int, block_size: int, *, private: bool = False
    ) -> Segment:
        """Its tokens from block `first` on, as many as `blocks` hold: mapped, or in private blocks."""
        skipped = first * block_size
        num_tokens = min(len(blocks) * block_size, self.num_tokens - skipped)
        position = self.position + skipped
        stored_position = position if private else self.ref.stored_position + skipped
        return Segment(blocks, num_tokens, position, stored_position, private=private)


@dataclass(frozen=True, slots=True)
class PrivatePiece:
    """Prompt tokens that are computed in blocks of their own."""

    position: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


PlacedPiece = MappedPiece | PrivatePiece


@dataclass(frozen=True, slots=True)
class Placement:
    """Pieces in order of position; the last is private and takes the answer's tokens too.

    Attributes:
        refs: the chunks to pin, each once, and what they are computed behind.
        num_fresh_blocks: private blocks that the prompt needs.
        num_private_blocks: those, and, before a look, the ones that it may choose.
        num_answer_blocks: that the longest answer will need beside them.
        look: what is to be measured before the policy chooses; None where it has chosen.
    """

    block_size: int
    pieces: tuple[PlacedPiece, ...]
    refs: tuple[ChunkRef, ...]
    num_fresh_blocks: int
    num_private_blocks: int
    num_answer_blocks: int
    look: LookRequest | None = None

    @property
    def num_mapped_blocks(self) -> int:
        """Blocks of all the chunks to pin."""
        return sum(_blocks(ref.num_tokens, self.block_size) for ref in self.refs)

    @property
    def num_fresh_tokens(self) -> int:
        """Tokens of the private pieces."""
        return sum(piece.num_tokens for piece in self.pieces if isinstance(piece, PrivatePiece))

    @property
    def is_exact(self) -> bool:
        """Whether the KV of every token is, or becomes, what a full prefill makes of it."""
        return all(piece.exact for piece in self.pieces if isinstance(piece, MappedPiece))

    @property
    def open_piece(self) -> PrivatePiece | None:
        """What is computed behind nothing but whole, exact chunks; None where something else comes first."""
        for piece in self.pieces:
            if isinstance(piece, PrivatePiece):
                return piece
            if not piece.exact or piece.fresh:
                return None
        raise AssertionError("bug: a placement without a private piece")

    def table(self, chunks: Mapping[str, Sequence[int]], private: Sequence[int]) -> BlockTable:
        """The block table of the prompt.

        Args:
            chunks: input key -> blocks, of every ref.
            private: at least `num_fresh_blocks` ids, of which the first are used.
        """
        table = BlockTable(self.block_size)
        left = list(reversed(private))  # a stack
        for piece in self.pieces:
            num_blocks = _blocks(piece.num_tokens, self.block_size)
            if isinstance(piece, PrivatePiece):
                blocks = _pop(left, num_blocks)
                table.append(Segment(blocks, piece.num_tokens, piece.position, piece.position, private=True))
                continue
            blocks = tuple(chunks[piece.ref.input_key][:num_blocks])
            start = 0  # of what is left of it, in blocks
            for first, count in piece.fresh:
                if start < first:
                    table.append(piece.segment(blocks[start:first], start, self.block_size))
                table.append(piece.segment(_pop(left, count), first, self.block_size, private=True))
                start = first + count
            if start < num_blocks:
                table.append(piece.segment(blocks[start:], start, self.block_size))
        return table


def place(request: GenerateRequest, look: BlockMass | None = None) -> Placement:
    """Asks the request's policy and lays the prompt out.

    Args:
        look: what the policy's look has measured; without it, a policy that looks gets its looking pass.
    """
    choice = _choose(request, look)
    pieces: list[PlacedPiece] = []
    position = private_start = 0
    fresh = iter(choice.fresh)
    exact = iter(choice.exact)
    for piece in (request.prefix, *request.pieces):
        end = position + len(piece_ids(piece))
        if isinstance(piece, ChunkRef):
            indices, is_exact = next(fresh), next(exact)
            if len(indices) < _blocks(piece.num_tokens, request.block_size):
                if private_start < position:
                    pieces.append(PrivatePiece(private_start, position - private_start))
                pieces.append(MappedPiece(piece, position, piece.num_tokens, is_exact, _runs(indices)))
                private_start = end
        position = end
    pieces.append(PrivatePiece(private_start, request.prompt_tokens - private_start))
    return _assemble(request, pieces, choice.look, choice.undecided)


def place_behind(request: GenerateRequest, placement: Placement, found: Sequence[MappedPiece]) -> Placement:
    """The placement with these pieces, in order, at the beginning of its open piece."""
    opened = placement.open_piece
    assert opened is not None and found[0].position == opened.position, "bug: a piece for another place"
    pieces: list[PlacedPiece] = []
    for piece in placement.pieces:
        pieces.extend([*found] if piece is opened else [piece])
        if piece is opened and found[-1].end < opened.end:
            pieces.append(PrivatePiece(found[-1].end, opened.end - found[-1].end))
    return _assemble(request, pieces, None, 0)


def _assemble(
    request: GenerateRequest, pieces: Sequence[PlacedPiece], look: LookRequest | None, undecided: int
) -> Placement:
    size = request.block_size
    refs = {piece.ref.input_key: piece.ref for piece in pieces if isinstance(piece, MappedPiece)}
    context = request.chunk_context
    if any(ref.context_ids and ref.context_ids == context.token_ids for ref in refs.values()):
        refs[context.input_key] = context  # one that is missing is computed behind it
    num_fresh = sum(
        _blocks(piece.num_tokens, size)
        if isinstance(piece, PrivatePiece)
        else sum(count for _, count in piece.fresh)
        for piece in pieces
    )
    last = pieces[-1]
    # the last token of an answer is never fed back, so its key needs no slot
    longest = last.num_tokens + request.sampling.max_tokens - 1
    growth = _blocks(longest, size) - _blocks(last.num_tokens, size)
    most = num_fresh + undecided
    return Placement(size, tuple(pieces), tuple(refs.values()), num_fresh, most, growth, look)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Of the prefix and each chunk.

    Attributes:
        exact: whether it stands behind its own context.
        fresh: the blocks to compute.
        undecided: how many a look may add.
    """

    exact: list[bool]
    fresh: list[list[int]]
    look: LookRequest | None = None
    undecided: int = 0


def _choose(request: GenerateRequest, look: BlockMass | None) -> _Choice:
    mapped = _mapped_chunks(request)
    exact = [True, *(chunk.context_exact for chunk in mapped)]
    if request.reuse == "off":
        sizes = [_blocks(ref.num_tokens, request.block_size) for ref in (request.prefix, *request.chunks)]
        return _Choice(exact, [list(range(size)) for size in sizes])
    policy = request.policy
    most = policy.max_fresh_blocks(mapped) if policy.look is not None else 0
    if most and look is None:
        return _Choice(exact, [[] for _ in exact], policy.look, most)
    fresh = policy.fresh_blocks(mapped, look)
    assert len(fresh) == len(mapped) and all(
        not indices or list(indices) == sorted(set(indices) & set(range(chunk.num_blocks)))
        for indices, chunk in zip(fresh, mapped, strict=True)
    ), "bug: a policy named blocks that are not there, or not in order"
    assert look is None or sum(map(len, fresh)) <= most, "bug: a policy named more blocks than it said"
    return _Choice(exact, [[], *fresh])


def _mapped_chunks(request: GenerateRequest) -> list[MappedChunk]:
    """The request's chunks as a policy sees them."""
    mapped = []
    position, previous = request.prefix.num_tokens, ""
    for piece in request.pieces:
        if isinstance(piece, ChunkRef):
            blocks = _blocks(piece.num_tokens, request.block_size)
            is_exact = piece.stored_position == position and _stands_behind(piece, request)
            follows = bool(piece.after) and piece.after == previous
            mapped.append(MappedChunk(piece.num_tokens, blocks, is_exact, follows))
        position += len(piece_ids(piece))
        previous = piece.input_key if isinstance(piece, ChunkRef) else ""
    return mapped


def _stands_behind(ref: ChunkRef, request: GenerateRequest) -> bool:
    """Whether the prompt begins with what the chunk was computed behind."""
    return ref.context_ids == tuple(request.prompt_ids[: ref.stored_position].tolist())


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
