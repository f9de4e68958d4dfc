"""The ways in which a request can be laid out, the one that computes least first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memkv.engine.continuations import Continuations
from memkv.engine.placement import Placement, place, place_behind
from memkv.engine.request import GenerateRequest


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One of them.

    Attributes:
        open_at: where earlier requests' runs could begin.
        num_continued: prompt tokens that such runs hold.
    """

    request: GenerateRequest
    placement: Placement
    open_at: int
    num_continued: int = 0


def arrangements(request: GenerateRequest, continuations: Continuations) -> Iterator[Arrangement]:
    """The last one needs the blocks that were asked for when the request came, and no others."""
    plain = _plain(request)
    if request.reuse != "off":
        continued = _continued(plain, continuations)
        if continued is not plain:
            yield continued
    yield plain


def _plain(request: GenerateRequest) -> Arrangement:
    placement = place(request)
    opened = placement.open_piece or placement.pieces[-1]
    return Arrangement(request, placement, opened.position)


def _continued(plain: Arrangement, continuations: Continuations) -> Arrangement:
    request, placement = plain.request, plain.placement
    opened = placement.open_piece
    if opened is None or placement.look is not None:
        return plain
    end = min(opened.end, request.prompt_tokens - max(1, request.keep_logits))  # those need logits
    found = continuations.find(request.prefix.input_key, request.prompt_ids(), opened.position, end)
    if not found:
        return plain
    num_continued = sum(piece.num_tokens for piece in found)
    return Arrangement(request, place_behind(request, placement, found), opened.position, num_continued)
