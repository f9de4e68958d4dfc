"""Tasks whose answers are known because they were made up: needles, two hops, and what occurs most often.

In the manner of RULER (Hsieh et al., arXiv 2404.06654): facts with invented names stand among sentences that
say nothing, each in a passage of its own. A needle's prompt is filled with passages that hold no fact, the
other ones' with passages of other tasks, whose facts have the same form and other names; "needle_among" is a
needle among those.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from memkv.errors import BadRequestError
from memkv.eval.tasks import Task

KINDS = ("needle", "needle_among", "multi_hop", "aggregation")

_COLOUR_NAMES = (
    "amber azure black bronze copper coral crimson golden green grey indigo ivory lilac maroon olive orange "
    "pink purple red scarlet silver teal violet white yellow"
)
_PLACE_NAMES = (
    "archway barn boathouse bridge cabin cellar chapel cottage depot dock gallery garage gate granary hall "
    "harbour kiln library lodge mill office pavilion pier quarry shed stable station storeroom tower tunnel "
    "vault warehouse wharf windmill workshop"
)
_FIRST_NAMES = "Ada Boris Clara Dorian Edith Felix Greta Hugo Ines Jonas Karin Leo Mara Nils Olga Paul Rosa"
_LAST_NAMES = "Abbott Becker Calder Dunn Eaton Falk Garner Holm Irving Jansen Keller Lund Marsh North Orton"
_SIGNS = "anchor arrow bell crown feather hammer key kite lantern leaf moon shell star wheel"
_FILLER = (
    "The morning was quiet and the road was dry.",
    "Nobody had asked for a change of plan.",
    "The windows were cleaned before the visitors came.",
    "A small fire was lit because the evenings had turned cold.",
    "The old map on the wall had not been used for years.",
    "Tea was served at four, as on any other day.",
    "Two boxes were moved from one room to the next.",
    "The weather report promised light wind from the west.",
    "Someone had left an umbrella beside the stairs.",
    "The clock in the corridor was three minutes slow.",
    "A letter about the new timetable had arrived.",
    "The path behind the building was repaired in spring.",
    "There was bread on the table and soup on the stove.",
    "The list of repairs was shorter than the year before.",
    "Children were playing near the water.",
    "The paint on the railing was still wet.",
    "Most of the guests stayed until the music ended.",
    "The lamps were checked once a week.",
    "A dog slept in the shade of the wall.",
    "The notebook was kept in the upper drawer.",
    "It rained for an hour and then the sun came out.",
    "The delivery came late, but nothing was missing.",
    "The garden had been watered twice.",
    "They talked about the price of timber.",
)
_SENTENCES = 12  # of a passage, the fact included
_HAYSTACK = 64  # passages without a fact


def generate_tasks(count: int, seed: int = 0, kinds: tuple[str, ...] = KINDS) -> list[Task]:
    """`count` tasks, the kinds in turn; the same seed gives the same tasks. No name occurs in two of them.

    Raises:
        BadRequestError: there are not so many names, or a kind is unknown.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        raise BadRequestError(
            f"unknown kinds of tasks: {', '.join(unknown) or 'none'}", hint=", ".join(KINDS)
        )
    names = _Names.shuffled(random.Random(seed))
    if not 1 <= count <= len(names.people):
        raise BadRequestError(f"{count} tasks cannot be made", hint=f"1 to {len(names.people)}")
    makers = {
        "needle": _needle,
        "needle_among": _needle_among,
        "multi_hop": _multi_hop,
        "aggregation": _aggregation,
    }
    return [
        makers[kinds[index % len(kinds)]](random.Random(f"{seed} {index}"), index, names)
        for index in range(count)
    ]


@dataclass(frozen=True, slots=True)
class _Names:
    places: list[str]
    people: list[str]
    haystack: tuple[str, ...]

    @classmethod
    def shuffled(cls, source: random.Random) -> _Names:
        places = [f"{colour} {place}" for colour in _COLOUR_NAMES.split() for place in _PLACE_NAMES.split()]
        people = [
            f"{first} {initial}. {last}"
            for first in _FIRST_NAMES.split()
            for last in _LAST_NAMES.split()
            for initial in "DKMTW"
        ]
        source.shuffle(places)
        source.shuffle(people)
        haystack = tuple(_passage(source, source.choice(_FILLER)) for _ in range(_HAYSTACK))
        return cls(places, people[: len(places)], haystack)


def _needle(source: random.Random, index: int, names: _Names) -> Task:
    place, code = names.places[index], _number(source)
    return Task(
        id=f"needle-{index}",
        kind="needle",
        question=f"What is the access code of the {place}?",
        answers=(f"{code}.",),
        contexts=(_passage(source, f"The access code of the {place} is {code}."),),
        answer_start=f"The access code of the {place} is",
        distractors=names.haystack,
    )


def _needle_among(source: random.Random, index: int, names: _Names) -> Task:
    needle = _needle(source, index, names)
    return replace(needle, id=f"needle-among-{index}", kind="needle_among", distractors=None)


def _multi_hop(source: random.Random, index: int, names: _Names) -> Task:
    place, person, number = names.places[index], names.people[index], _number(source)
    return Task(
        id=f"multi-hop-{index}",
        kind="multi_hop",
        question=f"Who looks after the {place}, and what is that person's locker number?",
        answers=(f"{person}. The locker number of {person} is {number}.",),
        contexts=(
            _passage(source, f"The {place} is looked after by {person}."),
            _passage(source, f"The locker number of {person} is {number}."),
        ),
        answer_start=f"The {place} is looked after by",
    )


def _aggregation(source: random.Random, index: int, names: _Names) -> Task:
    place = names.places[index]
    often, *others = source.sample(_SIGNS.split(), 4)
    signs = [often] * 4 + others
    source.shuffle(signs)
    return Task(
        id=f"aggregation-{index}",
        kind="aggregation",
        question=f"Which sign was seen most often at the {place}?",
        answers=(f"{often}.",),
        contexts=tuple(_passage(source, f"The sign seen at the {place} was the {sign}.") for sign in signs),
        answer_start=f"The sign seen most often at the {place} was the",
    )


def _number(source: random.Random) -> int:
    return source.randrange(1000, 10_000)


def _passage(source: random.Random, fact: str) -> str:
    sentences = source.sample(_FILLER, _SENTENCES - 1)
    sentences.insert(source.randrange(len(sentences) + 1), fact)
    return " ".join(sentences)
