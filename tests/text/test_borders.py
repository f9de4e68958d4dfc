"""Ranks depend on what follows a border and on nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from memkv.text.borders import Level, _window_max, find_borders

DOCUMENT = """# Title

First paragraph. It has two sentences, and a
second line.

    indented = code

- item one
- item two
"""


def levels(text: str) -> dict[str, Level]:
    """The first word behind each border, and its level."""
    borders = find_borders(text, long_piece=10_000)
    behind = [
        text[position:].split()[0] for position in borders.positions.tolist() if text[position:].strip()
    ]
    return dict(zip(behind, [Level(rank >> 56) for rank in borders.ranks.tolist()], strict=True))


def test_levels_follow_the_structure() -> None:
    found = levels("Intro\n\n" + DOCUMENT)
    assert found["#"] == Level.HEADING
    assert found["First"] == Level.CLAUSE  # stays with its heading
    assert found["It"] == Level.SENTENCE
    assert found["second"] == Level.LINE
    assert found["indented"] == Level.BLOCK
    assert found["-"] in (Level.PARAGRAPH, Level.LINE)


def test_long_pieces_get_inner_borders_of_their_best_kind() -> None:
    generator = random.Random(2)
    words = " ".join("".join(generator.choices("abcdefgh", k=generator.randint(2, 9))) for _ in range(300))
    borders = find_borders(words, long_piece=100)
    assert len(borders.positions) > 50
    assert {Level(rank >> 56) for rank in borders.ranks.tolist()[1:]} == {Level.WORD}
    assert all(words[position - 1] == " " for position in borders.positions.tolist()[1:])
    assert len(find_borders(words, long_piece=10_000).positions) == 1
    unbroken = find_borders("".join(chr(0x4E00 + i * 7 % 2000) for i in range(1000)), long_piece=100)
    gaps = np.diff(unbroken.positions)
    assert gaps[1:].min() >= 8
    assert gaps.max() < 100


@pytest.mark.parametrize("seed", range(5))
def test_an_edit_changes_ranks_near_it_only(seed: int) -> None:
    generator = np.random.default_rng(seed)
    text = "".join(generator.choice(list("abcdefgh ,.\n"), 4000))
    at = int(generator.integers(100, 3900))
    edited = text[:at] + "INSERTED" + text[at:]
    before, after = find_borders(text, 64), find_borders(edited, 64)
    old = dict(zip(before.positions.tolist(), before.ranks.tolist(), strict=True))
    new = dict(zip(after.positions.tolist(), after.ranks.tolist(), strict=True))
    left = {p: r for p, r in old.items() if p < at - 100}
    right = {p + 8: r for p, r in old.items() if p > at + 100}
    assert left == {p: r for p, r in new.items() if p < at - 100}
    assert right == {p: r for p, r in new.items() if p > at + 108}
    assert len(left) > 1
    assert len(right) > 1


def test_no_border_stands_inside_a_letter_or_an_emoji() -> None:
    text = "e\u0301\u0302" * 200 + "👩\u200d👩\u200d👧\u200d👦" * 100 + "👍\U0001f3fd" * 100
    for position in find_borders(text, 16).positions.tolist():
        assert text[position] not in "\u0301\u0302\u200d\U0001f3fd"
        assert position == 0 or text[position - 1] != "\u200d"


def test_repetitions_are_cut_at_the_same_place() -> None:
    text = "abcdefghijklm" * 300
    positions = find_borders(text, 64).positions[2:-2]
    assert len(positions) > 100
    assert len({int(position) % 13 for position in positions}) == 1


def test_window_maximum() -> None:
    values = np.random.default_rng(1).integers(0, 50, 200).astype(np.uint64)
    expected = [values[max(0, i - 8) : i + 9].max() for i in range(200)]
    assert _window_max(values, 8).tolist() == expected
