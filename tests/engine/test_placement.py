"""Placement: every prompt token stands somewhere, once; only what a policy names is computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_harness import RandomPrompts
from hypothesis import given, settings
from hypothesis import strategies as st

from memkv.engine.placement import MappedPiece, Placement, PrivatePiece, place
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import BlockMass, Exact, Head, Map, MappedChunk, ReusePolicy
from memkv.engine.sampler import Sampling
from memkv.kv.block_table import Segment

SIZE = 16


class Chosen(ReusePolicy):
    """Any blocks at all, drawn from a seed."""

    name = "chosen"

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        bits, fresh = self._bits, []
        for chunk in mapped:
            fresh.append([index for index in range(chunk.num_blocks) if bits >> index & 1])
            bits >>= chunk.num_blocks
        return fresh


policies = st.one_of(
    st.just(Exact()),
    st.just(Map()),
    st.builds(Head, st.integers(1, 4)),
    st.builds(Chosen, st.integers(0, 2**64 - 1)),
)


@settings(deadline=None, max_examples=150)
@given(
    prefix=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 70), max_size=6),
    tail=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    policy=policies,
    reuse=st.sampled_from(["auto", "off", "strict"]),
    repeat=st.booleans(),
)
def test_the_table_covers_the_prompt_exactly(
    prefix: int, sizes: list[int], tail: int, max_tokens: int, policy: ReusePolicy, reuse: str, repeat: bool
) -> None:
    prompts = RandomPrompts(500, prefix)
    chunks = [prompts.chunk(size) for size in sizes]
    if repeat and chunks:
        chunks.append(chunks[0])
    request = GenerateRequest(
        prompts.prefix,
        tuple(chunks),
        prompts.ids(tail),
        SIZE,
        policy,
        reuse,  # type: ignore[arg-type]
        Sampling(max_tokens=max_tokens),
    )
    placement = place(request)
    shared = {
        ref.input_key: [1000 + 100 * index + i for i in range(-(-ref.num_tokens // SIZE))]
        for index, ref in enumerate(placement.refs)
    }
    private = list(range(placement.num_private_blocks))
    table = placement.table(shared, private)
    table.check_integrity()

    positions = [p for s in table.segments for p in range(s.position, s.end)]
    assert positions == list(range(request.prompt_tokens))
    assert table.segments[-1].private and table.segments[-1].num_tokens >= tail
    assert sorted(table.private_blocks()) == private
    assert len(table.private_blocks()) == placement.num_fresh_blocks
    room = len(table.segments[-1].blocks) * SIZE - table.segments[-1].num_tokens
    room += placement.num_answer_blocks * SIZE
    assert max_tokens - 1 <= room < max_tokens - 1 + SIZE
    assert placement.num_mapped_blocks == sum(map(len, shared.values()))

    computed = {p for s in table.segments if s.private for p in range(s.position, s.end)}
    assert computed == set(range(request.prompt_tokens)) - expected_mapped(request)
    ids = request.prompt_ids.tolist()
    for segment in table.segments:  # what is mapped holds the prompt's own tokens
        if not segment.private:
            piece = next(
                each
                for each in placement.pieces
                if isinstance(each, MappedPiece)
                and each.position <= segment.position < each.position + each.ref.num_tokens
            )
            start = segment.stored_position - piece.ref.stored_position
            own = list(piece.ref.token_ids[start : start + segment.num_tokens])
            assert ids[segment.position : segment.end] == own
            first = start // SIZE
            assert list(segment.blocks) == shared[piece.ref.input_key][first : first + len(segment.blocks)]


def expected_mapped(request: GenerateRequest) -> set[int]:
    """Positions that are not computed, by the words of the policies."""
    if request.reuse == "off":
        return set()
    mapped = set(range(request.prefix.num_tokens))
    start = request.prefix.num_tokens
    sizes = [-(-chunk.num_tokens // SIZE) for chunk in request.chunks]
    exact = [index == 0 for index in range(len(sizes))]
    views = [
        MappedChunk(chunk.num_tokens, size, is_exact)
        for chunk, size, is_exact in zip(request.chunks, sizes, exact, strict=True)
    ]
    for chunk, fresh in zip(request.chunks, request.policy.fresh_blocks(views), strict=True):
        for i in range(chunk.num_tokens):
            if i // SIZE not in fresh:
                mapped.add(start + i)
        start += chunk.num_tokens
    return mapped


def request_of(
    policy: ReusePolicy, sizes: tuple[int, ...] = (40, 50, 33), reuse: str = "auto"
) -> GenerateRequest:
    prompts = RandomPrompts(500)
    chunks = tuple(prompts.chunk(size, f"c{size}") for size in sizes)
    return GenerateRequest(prompts.prefix, chunks, prompts.ids(7), SIZE, policy, reuse)  # type: ignore[arg-type]


def test_exact_pins_the_prefix_and_the_first_chunk_only() -> None:
    placement = place(request_of(Exact()))
    assert [ref.input_key for ref in placement.refs] == ["prefix", "c40"]
    assert placement.pieces[-1] == PrivatePiece(13 + 40, 50 + 33 + 7)


def test_off_is_one_private_run() -> None:
    placement = place(request_of(Map(), reuse="off"))
    assert placement.pieces == (PrivatePiece(0, 13 + 40 + 50 + 33 + 7),)
    assert placement.refs == ()


def test_head_replaces_the_first_blocks_of_every_later_chunk() -> None:
    placement = place(request_of(Head(2)))
    assert [piece.fresh for piece in placement.pieces if isinstance(piece, MappedPiece)] == [
        (),
        (),
        ((0, 2),),
        ((0, 2),),
    ]


@pytest.mark.parametrize(
    ("fresh", "expected"),
    [
        (
            ((1, 1),),
            [
                Segment((7,), 16, 100, 13),
                Segment((3,), 16, 116, 116, private=True),
                Segment((9,), 8, 132, 45),
            ],
        ),
        (((2, 1),), [Segment((7, 8), 32, 100, 13), Segment((3,), 8, 132, 132, private=True)]),
        (
            ((0, 1), (2, 1)),
            [
                Segment((3,), 16, 100, 100, private=True),
                Segment((8,), 16, 116, 29),
                Segment((4,), 8, 132, 132, private=True),
            ],
        ),
    ],
)
def test_fresh_blocks_split_a_chunk(fresh: tuple[tuple[int, int], ...], expected: list[Segment]) -> None:
    ref = ChunkRef("c", tuple(range(13)), tuple(range(40)))
    pieces = (MappedPiece(ref, 100, 40, False, fresh), PrivatePiece(140, 5))
    placement = Placement(16, pieces, (ref,), 3, 3, 0)
    table = placement.table({"c": (7, 8, 9)}, [*[3, 4, 5][: len(fresh)], 6])
    assert list(table.segments[:-1]) == expected
    table.check_integrity()


def test_a_chunk_that_is_fresh_throughout_is_not_pinned() -> None:
    placement = place(request_of(Head(3)))  # the third chunk has three blocks
    assert [ref.input_key for ref in placement.refs] == ["prefix", "c40", "c50"]


def test_a_chunk_behind_exactly_its_own_context_is_exact_wherever_it_stands() -> None:
    prompts = RandomPrompts(500)
    first = prompts.chunk(20, "first")
    second = ChunkRef("second", prompts.prefix.token_ids + first.token_ids, prompts.ids(20))
    request = GenerateRequest(prompts.prefix, (first, second), prompts.ids(3), SIZE, Exact())
    assert [ref.input_key for ref in place(request).refs] == ["prefix", "first", "second"]


def test_a_policy_that_names_blocks_that_are_not_there_is_a_bug() -> None:
    class Wrong(ReusePolicy):
        name = "wrong"

        def fresh_blocks(
            self, mapped: Sequence[MappedChunk], look: BlockMass | None = None
        ) -> list[list[int]]:
            return [[chunk.num_blocks] for chunk in mapped]

    with pytest.raises(AssertionError, match="policy"):
        place(request_of(Wrong()))
