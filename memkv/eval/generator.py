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
_SUBJECTS = (
    "the gardener|an old sailor|a young teacher|the postman|two visitors|the night watchman|"
    "a painter|the cook|some children|a doctor from the next town|the carpenter|a tall stranger|"
    "the librarian|three musicians|a tired traveller|the baker's son|a clerk|the ferryman|"
    "a group of students|the new tenant|a farmer|the plumber|an engineer|the landlady"
)
_DEEDS = (
    "repaired a wooden chair|read a long letter|waited for the last train|carried a heavy basket|"
    "asked for tea|counted the empty boxes|lost a grey umbrella|drew a map of the coast|"
    "swept the stairs|sold a dozen eggs|wrote three postcards|polished the brass lamps|"
    "looked for a quiet seat|bought a bag of onions|hung wet coats by the stove|"
    "told a story about the war|fed the pigeons|fixed the garden fence|borrowed a ladder|"
    "complained about the noise|planted a row of beans|mended a torn sail|sang an old song|"
    "studied the timetable"
)
_WHERE = (
    "near the market|behind the church|beside the river|in the back room|under the old oak|"
    "at the corner shop|on the second floor|by the open window|along the sandy path|"
    "in front of the town hall|at the long table|next to the well|close to the border|"
    "in the narrow street|above the stables|outside the theatre|at the end of the valley|"
    "between two hedges|on the upper deck|in the waiting room|across the square|below the cliffs|"
    "in a small tent|at the edge of the wood"
)
_WHEN = (
    "On Monday|Early in spring|After the storm|Before supper|Late at night|During the holidays|"
    "Once the rain had stopped|At noon|A week later|In the cold season|When the bells rang|"
    "Towards evening|Two years ago|In the meantime|On the longest day|At the first light|"
    "Without a word|Every other week|Shortly after that|At the end of May|For some reason|"
    "To everyone's surprise|As usual|One foggy morning"
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
        haystack = tuple(_passage(source, _sentence(source)) for _ in range(_HAYSTACK))
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


def _sentence(source: random.Random) -> str:
    when, who, deed, where = (source.choice(words.split("|")) for words in (_WHEN, _SUBJECTS, _DEEDS, _WHERE))
    return f"{when} {who} {deed} {where}."


def _passage(source: random.Random, fact: str) -> str:
    sentences = [_sentence(source) for _ in range(_SENTENCES - 1)]
    sentences.insert(source.randrange(len(sentences) + 1), fact)
    return " ".join(sentences)
