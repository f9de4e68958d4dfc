"""The ways in which a request can be laid out, the one that computes least first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memkv.engine.continuations import Continuations
from memkv.engine.placement import Placement, place, place_behind
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import BlockMass

_MAX_ORDERS = 8  # that are tried for one request


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One of them.

    Attributes:
        order: of the chunks, as indices into those of the request that was made.
        open_at: where earlier requests' runs could begin.
        num_continued: prompt tokens that such runs hold.
        order_stays: whether it is the only order that will do.
    """

    request: GenerateRequest
    placement: Placement
    order: tuple[int, ...]
    open_at: int
    num_continued: int = 0
    order_stays: bool = False


def as_asked(request: GenerateRequest) -> Arrangement:
    """The request as it came, without what earlier ones left."""
    return _plain(request, tuple(range(len(request.chunks))))


def as_interrupted(
    request: GenerateRequest, answered: Sequence[int], order: tuple[int, ...], look: BlockMass | None
) -> Arrangement:
    """A request as it was laid out, going on behind the tokens of its answer that it has.

    Args:
        look: what its policy has measured.
    """
    keep_logits = min(1, request.keep_logits) if answered else request.keep_logits  # the others are kept
    longer = replace(request, tail_ids=(*request.tail_ids, *answered), keep_logits=keep_logits)
    return replace(_plain(longer, order, look), order_stays=True)


def arrangements(plain: Arrangement, continuations: Continuations) -> Iterator[Arrangement]:
    """Of a request as it was asked; the last one needs the blocks that this one does, and no others."""
    request = plain.request
    if request.reuse != "off":
        reorders = request.policy.reorders and not plain.order_stays
        orders = _orders(request, continuations) if reorders else []
        reordered = [_plain(_in_order(request, order), order) for order in orders]
        tried = [_continued(each, continuations) for each in (plain, *reordered)]
        best = min(tried, key=lambda each: each.placement.num_fresh_tokens)  # of equals the order asked for
        if best is not plain:
            yield best
    yield plain


def _plain(request: GenerateRequest, order: tuple[int, ...], look: BlockMass | None = None) -> Arrangement:
    placement = place(request, look)
    opened = placement.open_piece or placement.pieces[-1]
    return Arrangement(request, placement, order, opened.position)


def _continued(plain: Arrangement, continuations: Continuations) -> Arrangement:
    """The arrangement behind the runs that hold the beginning of what it computes."""
    request, placement = plain.request, plain.placement
    opened = placement.open_piece
    if opened is None or placement.look is not None:
        return plain
    end = min(opened.end, request.prompt_tokens - max(1, request.keep_logits))  # those need logits
    found = continuations.find(request.prefix.input_key, request.prompt_ids, opened.position, end)
    if not found:
        return plain
    num_continued = sum(piece.num_tokens for piece in found)
    return replace(plain, placement=place_behind(request, placement, found), num_continued=num_continued)


def _orders(request: GenerateRequest, continuations: Continuations) -> list[tuple[int, ...]]:
    """Orders whose beginning an earlier prompt had, those that share most tokens with it first."""
    ahead = list(itertools.takewhile(lambda piece: isinstance(piece, ChunkRef), request.pieces))
    shared: dict[tuple[int, ...], int] = {}
    for keys in continuations.chunk_orders(request.prefix.input_key):
        left = list(range(len(ahead)))
        order: list[int] = []
        for key in keys:
            index = next((index for index in left if request.chunks[index].input_key == key), None)
            if index is None:
                break
            left.remove(index)
            order.append(index)
        num_shared = sum(request.chunks[index].num_tokens for index in order)
        order += left + list(range(len(ahead), len(request.chunks)))
        if num_shared:
            shared.setdefault(tuple(order), num_shared)
    return sorted(shared, key=lambda order: -shared[order])[:_MAX_ORDERS]


def _in_order(request: GenerateRequest, order: tuple[int, ...]) -> GenerateRequest:
    chunks = iter(request.chunks[index] for index in order)
    pieces = tuple(next(chunks) if isinstance(piece, ChunkRef) else piece for piece in request.pieces)
    return replace(request, chunks=(), pieces=pieces)
