"""The lanes of the CUDA kernels, emulated: each fragment they load is the part of K, V and Q it is taken for.

What is emulated is the address of each lane, as few_queries.cuh, many_products.cuh and many_mass.cuh compute
it, and where the instructions put what they load (instructions.cuh, warpgroup.cuh).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

LANE = np.arange(32)
G, Q = LANE // 4, LANE % 4
PAIR = np.arange(2)

Array = np.ndarray


def load_matrices(memory: Array, byte: Array) -> list[Array]:
    """ldmatrix.x4: four [32, 2] registers; lane l points to row l % 8 of matrix l // 8."""
    rows = memory[byte[:, None] // 2 + np.arange(8)]  # [32 rows, 8 elements]
    return [rows[8 * i + G][LANE[:, None], 2 * Q[:, None] + PAIR] for i in range(4)]


def multiply(a: list[Array], b: list[Array]) -> Array:
    """mma.m16n8k16 with a zero accumulator: [32, 4]."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for register, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        left[(G + row)[:, None], (2 * Q + column)[:, None] + PAIR] = a[register]
    for register, row in enumerate((0, 8)):
        right[(2 * Q + row)[:, None] + PAIR, G[:, None]] = b[register]
    product = left @ right
    return np.stack([product[G + i // 2 * 8, 2 * Q + i % 2] for i in range(4)], axis=1)


def transpose(register: Array) -> Array:
    """movmatrix: an 8 x 8 matrix across the warp."""
    matrix = np.zeros((8, 8))
    matrix[G[:, None], 2 * Q[:, None] + PAIR] = register
    return matrix.T[G[:, None], 2 * Q[:, None] + PAIR]


def wavefronts(byte: Array, banks: int = 32) -> int:
    """Of the 8 rows of one matrix, 16 bytes each."""
    words = (byte[:, None] + 4 * np.arange(4)) // 4
    return int(max(np.bincount(words.ravel() % banks)))


@pytest.mark.parametrize(("head_dim", "block_size"), list(itertools.product((64, 80, 128), (8, 16, 32))))
def test_few_queries_reads_blocks_as_they_are_stored(head_dim: int, block_size: int) -> None:
    random = np.random.default_rng(0)
    stage_tokens = max(16, block_size)
    keys, values = random.standard_normal((2, stage_tokens, head_dim))
    queries = random.standard_normal((8, head_dim))
    k_memory = np.concatenate(
        [
            block.reshape(block_size, head_dim // 8, 8).transpose(1, 0, 2).ravel()
            for block in np.split(keys, stage_tokens // block_size)
        ]
    )
    v_memory = np.concatenate([block.T.ravel() for block in np.split(values, stage_tokens // block_size)])

    token_row, piece = LANE % 8 + LANE // 8 % 2 * 8, LANE // 16
    slab = head_dim * block_size * 2
    k_lane = token_row // block_size * slab + token_row % block_size * 16 + piece * block_size * 16
    v_token, v_row = LANE // 16 * 8, LANE % 16
    v_lane = v_token // block_size * slab + v_token % block_size * 2 + v_row * block_size * 2
    step_bytes = 2 * block_size * 16
    for part in range(0, stage_tokens, 16):
        score = np.zeros((32, 4))
        for step in range(head_dim // 16):
            a = load_matrices(k_memory, k_lane + part * 16 + step * step_bytes)
            d = (16 * step + 2 * Q)[:, None] + PAIR
            score += multiply(a, [queries[G[:, None], d], queries[G[:, None], d + 8]])
        expected = keys[part : part + 16] @ queries.T
        for i in range(4):
            np.testing.assert_allclose(score[:, i], expected[G + i // 2 * 8, 2 * Q + i % 2])
        weight = [transpose(score[:, :2]), transpose(score[:, 2:])]
        for step in range(head_dim // 16):
            a = load_matrices(v_memory, v_lane + part * 2 + step * step_bytes)
            out = multiply(a, weight)
            right = values[part : part + 16].T[16 * step : 16 * step + 16] @ expected
            for i in range(4):
                np.testing.assert_allclose(out[:, i], right[G + i // 2 * 8, 2 * Q + i % 2])


def matrices(memory: Array, byte: int, row_bytes: int, along_k: int, columns: int) -> Array:
    """What wgmma takes for B [16, columns], or for A's transpose: rows of 16, 32 or 64 bytes along k."""
    k, column = np.arange(16)[:, None], np.arange(columns)
    inside = k // 8 * along_k + k % 8 * 2 if row_bytes == 16 else k * 2
    at = byte + column * row_bytes + inside
    swizzle = {16: 0, 32: 1, 64: 3}[row_bytes]
    return memory[(at ^ (at >> 7 & swizzle) << 4) // 2]


def swizzled_piece(row_bytes: int, row: Array, piece: Array) -> Array:
    return {16: piece, 32: piece ^ (row >> 2 & 1), 64: piece ^ (row >> 1 & 3)}[row_bytes]


def ring_stage(keys: Array, values: Array, block_size: int) -> tuple[Array, int, int]:
    """K and V of a stage, as many_copies.cuh lays them down; bytes of K, and of a block of V."""
    tokens, head_dim = keys.shape
    k_bytes, row_bytes = keys.size * 2, block_size * 2
    v_rows = head_dim + (8 if head_dim <= 128 else 0)
    memory = np.full((k_bytes + v_rows * tokens * 2 + 256) // 2, np.nan)
    memory[: keys.size] = keys.reshape(tokens, head_dim // 8, 8).transpose(1, 0, 2).ravel()
    blocks = [block.T.ravel() for block in np.split(values, tokens // block_size)]  # as they are stored
    row_pieces, threads = row_bytes // 16, np.arange(128)
    block_pieces = head_dim * row_pieces
    for i in range(0, k_bytes // 16, 128):
        whole = block_pieces % 128 == 0
        of = np.full(128, i // block_pieces) if whole else (i + threads) // block_pieces
        first = i % block_pieces if whole else 0
        place = threads if whole else (i + threads) % block_pieces
        row, piece = place // row_pieces, place % row_pieces
        to = (
            row * row_bytes
            + swizzled_piece(row_bytes, row, piece) * 16
            + of * v_rows * row_bytes
            + first * 16
        )
        for thread in threads:
            source = blocks[of[thread]][(place[thread] + first) * 8 :][:8]
            memory[(k_bytes + to[thread]) // 2 :][:8] = source
        for lanes in np.split(to, 16):  # eight lanes write 128 bytes that lie together
            assert sorted(lanes - lanes.min()) == list(range(0, 128, 16)) or not whole
    for block in range(tokens // block_size if head_dim <= 128 else 0):
        start = (k_bytes + block * v_rows * row_bytes + head_dim * row_bytes) // 2
        memory[start : start + 8 * block_size] = 1.0
    if head_dim > 128:
        memory[-128:] = 1.0  # apart
    return memory, k_bytes, v_rows * row_bytes


SHAPES = [
    (head_dim, 64 if head_dim <= 128 else 32, block_size)
    for head_dim, block_size in itertools.product((64, 80, 96, 128, 256), (8, 16, 32))
]


@pytest.mark.parametrize(("head_dim", "tokens", "block_size"), SHAPES)
def test_warpgroups_read_the_ring(head_dim: int, tokens: int, block_size: int) -> None:
    random = np.random.default_rng(3)
    keys, values = random.standard_normal((2, tokens, head_dim))
    queries = random.standard_normal((64, head_dim))
    memory, k_bytes, slab_bytes = ring_stage(keys, values, block_size)
    assert k_bytes % 512 == 0 and slab_bytes % (8 * 2 * block_size) == 0  # where swizzled rows begin
    term = np.full(64 * head_dim, np.nan)
    for warp, step, i in itertools.product(range(4), range(head_dim // 16), range(4)):
        row, piece = warp * 16 + G + i % 2 * 8, (2 * step + i // 2) * 64
        at = (piece + row) * 16 + Q * 4
        d = 16 * step + 2 * Q + i // 2 * 8
        term[at[:, None] // 2 + PAIR] = queries[row[:, None], d[:, None] + PAIR]
    scores = np.zeros((64, tokens))
    for step in range(head_dim // 16):
        a = matrices(term, step * 2 * 64 * 16, 16, 64 * 16, 64).T
        scores += a @ matrices(memory, step * 2 * tokens * 16, 16, tokens * 16, tokens)
    np.testing.assert_allclose(scores, queries @ keys.T)
    out = np.zeros((64, head_dim + 8))
    for n in range(tokens // 16):
        block = n * 16 // block_size
        first = k_bytes + block * slab_bytes + (n * 16 - block * block_size) * 2
        weight, columns = scores[:, 16 * n : 16 * n + 16], head_dim + (8 if head_dim <= 128 else 0)
        out[:, :columns] += weight @ matrices(memory, first, 2 * block_size, slab_bytes, columns)
        if head_dim > 128:
            out[:, head_dim:] += weight @ matrices(memory, memory.size * 2 - 256, 16, 128, 8)
    np.testing.assert_allclose(out[:, :head_dim], scores @ values)
    np.testing.assert_allclose(out[:, head_dim:], np.repeat(scores.sum(1, keepdims=True), 8, axis=1))


@pytest.mark.parametrize(("head_dim", "tokens", "block_size"), SHAPES)
def test_many_queries_reads_its_ring(head_dim: int, tokens: int, block_size: int) -> None:
    random = np.random.default_rng(1)
    keys, values = random.standard_normal((2, tokens, head_dim))
    queries = random.standard_normal((16, head_dim))
    memory, k_bytes, slab_bytes = ring_stage(keys, values, block_size)
    row_bytes, row = 2 * block_size, LANE % 8 + LANE // 16 * 8
    k_lane = row * 16 + LANE // 8 % 2 * (tokens * 16)

    def v_lane(n: int) -> Array:
        group = n * 2 + LANE // 8 % 2
        piece = swizzled_piece(row_bytes, row, group % (block_size // 8))
        return k_bytes + group // (block_size // 8) * slab_bytes + row * row_bytes + piece * 16

    for lanes in (k_lane, v_lane(0), v_lane(1)):
        assert all(wavefronts(lanes[8 * i : 8 * i + 8]) == 1 for i in range(4))

    scores = np.zeros((tokens // 8, 32, 4))
    for step in range(head_dim // 16):
        d = (16 * step + 2 * Q)[:, None] + PAIR
        a = [queries[(G + i % 2 * 8)[:, None], d + i // 2 * 8] for i in range(4)]
        for n in range(0, tokens // 8, 2):
            k = load_matrices(memory, k_lane + step * 2 * tokens * 16 + n * 8 * 16)
            scores[n] += multiply(a, k[:2])
            scores[n + 1] += multiply(a, k[2:])
    expected = queries @ keys.T
    for n, i in itertools.product(range(tokens // 8), range(4)):
        np.testing.assert_allclose(scores[n][:, i], expected[G + i // 2 * 8, n * 8 + 2 * Q + i % 2])
    out = np.zeros((head_dim // 8, 32, 4))
    for n in range(tokens // 16):
        weight = [scores[2 * n + i // 2][:, i % 2 * 2 : i % 2 * 2 + 2] for i in range(4)]
        for m in range(head_dim // 16):
            v = load_matrices(memory, v_lane(n) + m * 16 * row_bytes)
            out[2 * m] += multiply(weight, v[:2])
            out[2 * m + 1] += multiply(weight, v[2:])
    right = expected @ values
    for n, i in itertools.product(range(head_dim // 8), range(4)):
        np.testing.assert_allclose(out[n][:, i], right[G + i // 2 * 8, n * 8 + 2 * Q + i % 2])


@pytest.mark.parametrize(("tokens", "block_size"), [(64, 8), (64, 16), (64, 32), (32, 8), (32, 32)])
def test_many_rows_add_up_their_mass(tokens: int, block_size: int) -> None:
    """Of one warp: 16 rows, the tokens of a stage."""
    weights = np.random.default_rng(4).random((16, tokens))
    fragments = np.stack(
        [weights[G + i // 2 % 2 * 8, i // 4 * 8 + 2 * Q + i % 2] for i in range(tokens // 2)], axis=1
    )
    blocks, per_block = tokens // block_size, block_size // 2
    by_row = [
        [fragments[:, b * per_block + n + 2 * row + i] for n in range(0, per_block, 4) for i in range(2)]
        for row in range(2)
        for b in range(blocks)
    ]
    sums = [np.sum(of, axis=0) for of in by_row]

    def exchanged(low: Array, high: Array, lane_bit: int) -> Array:
        """Lanes without the bit have the sum of `low` over two lanes, the others that of `high`."""
        has = LANE & lane_bit > 0
        return np.where(has, high, low) + np.where(has, low, high)[LANE ^ lane_bit]

    half = [exchanged(sums[b], sums[b + blocks], 1) for b in range(blocks)]
    found = np.full((blocks, 16), np.nan)
    row = G + Q % 2 * 8
    if blocks == 1:
        found[0, row] = half[0] + half[0][LANE ^ 2]
    else:
        for b in range(blocks // 2):
            found[Q // 2 * (blocks // 2) + b, row] = exchanged(half[b], half[b + blocks // 2], 2)
    np.testing.assert_allclose(found, weights.reshape(16, blocks, block_size).sum(2).T)


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize(("group", "first_head"), [(4, 0), (3, 2), (17, 5), (1, 0), (32, 31)])
def test_each_row_gives_its_mass_to_its_head(group: int, first_head: int, warps: int, blocks: int) -> None:
    """Warps have a stage and some heads, lanes a block and some rows."""
    kept, num_rows, parts = 4, 16 * warps - 5, 32 // blocks
    found: dict[tuple[int, int, int], list[int]] = {}
    for warp, lane in itertools.product(range(warps), range(32)):
        for head in range(warp // kept, group, warps // kept):
            first = (head + group - first_head) % group
            rows = range(first + lane // blocks * group, num_rows, parts * group)
            found.setdefault((warp % kept, lane % blocks, head), []).extend(rows)
    assert len(found) == kept * blocks * group
    for (_, _, head), rows in found.items():
        assert sorted(rows) == [row for row in range(num_rows) if (first_head + row) % group == head]
