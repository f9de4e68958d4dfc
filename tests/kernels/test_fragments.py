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


def core_matrices(memory: Array, byte: int, along_k: int, columns: int) -> Array:
    """What wgmma takes for B [16, columns]: 8 x 8 core matrices, columns in rows of 16 bytes."""
    k, column = np.arange(16)[:, None], np.arange(columns)
    at = byte + k // 8 * along_k + column // 8 * 128 + column % 8 * 16 + k % 8 * 2
    return memory[at // 2]


def ring_stage(keys: Array, values: Array) -> tuple[Array, int, int]:
    """K and V of a stage in shared memory; bytes of K, and of a group of 8 tokens of V."""
    tokens, head_dim = keys.shape
    group_bytes = head_dim * 16 + (0 if head_dim > 128 else 128 + 64)
    k_bytes = keys.size * 2
    memory = np.full((k_bytes + tokens // 8 * group_bytes + 256) // 2, np.nan)
    memory[: keys.size] = keys.reshape(tokens, head_dim // 8, 8).transpose(1, 0, 2).ravel()
    for group in range(tokens // 8):
        start = (k_bytes + group * group_bytes) // 2
        memory[start : start + head_dim * 8] = values[group * 8 : group * 8 + 8].T.ravel()
        if head_dim <= 128:
            memory[start + head_dim * 8 : start + head_dim * 8 + 64] = 1.0
    if head_dim > 128:
        memory[-128:] = 1.0  # apart
    return memory, k_bytes, group_bytes


@pytest.mark.parametrize(("head_dim", "tokens"), [(64, 64), (80, 64), (96, 64), (128, 64), (256, 32)])
def test_warpgroups_read_the_ring(head_dim: int, tokens: int) -> None:
    random = np.random.default_rng(3)
    keys, values = random.standard_normal((2, tokens, head_dim))
    queries = random.standard_normal((64, head_dim))
    memory, k_bytes, group_bytes = ring_stage(keys, values)
    scores = np.zeros((64, tokens))
    for step in range(head_dim // 16):
        b = core_matrices(memory, step * 2 * tokens * 16, tokens * 16, tokens)
        scores += queries[:, 16 * step : 16 * step + 16] @ b
    np.testing.assert_allclose(scores, queries @ keys.T)
    out = np.zeros((64, head_dim + 8))
    for n in range(tokens // 16):
        weight, first = scores[:, 16 * n : 16 * n + 16], k_bytes + 2 * n * group_bytes
        if head_dim <= 128:
            out += weight @ core_matrices(memory, first, group_bytes, head_dim + 8)
        else:
            out[:, :head_dim] += weight @ core_matrices(memory, first, group_bytes, head_dim)
            out[:, head_dim:] += weight @ core_matrices(memory, memory.size * 2 - 256, 128, 8)
    np.testing.assert_allclose(out[:, :head_dim], scores @ values)
    np.testing.assert_allclose(out[:, head_dim:], np.repeat(scores.sum(1, keepdims=True), 8, axis=1))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_many_queries_reads_its_ring(head_dim: int) -> None:
    random = np.random.default_rng(1)
    tokens = 64
    keys, values = random.standard_normal((2, tokens, head_dim))
    queries = random.standard_normal((16, head_dim))
    memory, k_bytes, group_bytes = ring_stage(keys, values)
    k_lane = (LANE % 8 + LANE // 16 * 8) * 16 + LANE // 8 % 2 * (tokens * 16)
    v_lane = k_bytes + (LANE % 8 + LANE // 16 * 8) * 16 + LANE // 8 % 2 * group_bytes
    for lanes in (k_lane, v_lane):
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
    for n in range(0, tokens // 8, 2):
        weight = [scores[n + i // 2][:, i % 2 * 2 : i % 2 * 2 + 2] for i in range(4)]
        for m in range(head_dim // 16):
            v = load_matrices(memory, v_lane + n * group_bytes + m * 16 * 16)
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


@pytest.mark.parametrize(("group", "first_head"), [(4, 0), (3, 2), (17, 5), (1, 0), (32, 31)])
def test_each_row_gives_its_mass_to_its_head(group: int, first_head: int) -> None:
    num_rows = 128 - 5
    found = [list(range((head + group - first_head) % group, num_rows, group)) for head in range(group)]
    assert sorted(itertools.chain(*found)) == list(range(num_rows))
    assert all((first_head + row) % group == head for head, rows in enumerate(found) for row in rows)
