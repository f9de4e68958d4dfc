"""The exception tree: what its docstring draws, what a status and a code become."""

from __future__ import annotations

import re

import pytest

from memkv import errors


def test_the_docstring_draws_the_whole_tree() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, tuple[str, int | None]] = {}
    parents = {0: "MemKVError"}
    for line in errors.__doc__.splitlines():
        match = re.match(r"^    ([│ ]*)[├└]── (\w+)\s*(\d{3})?", line)
        if match:
            depth = len(match[1]) // 4 + 1
            parents[depth] = match[2]
            drawn[match[2]] = (parents[depth - 1], int(match[3]) if match[3] else None)
    classes = {cls.__name__: cls for cls in errors.error_classes().values()}
    assert set(drawn) == set(classes) - {"MemKVError"}
    for name, (parent, status) in drawn.items():
        assert classes[name].__base__ is classes[parent], name
        if status is not None:
            assert classes[name].status == status, name


def test_codes_are_unique() -> None:
    found: list[str] = []
    waiting: list[type[errors.MemKVError]] = [errors.MemKVError]
    while waiting:
        cls = waiting.pop()
        found.append(cls.code)
        waiting.extend(cls.__subclasses__())
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("collection_not_found", 404, errors.CollectionNotFound),
        ("something_newer", 404, errors.NotFoundError),
        ("something_newer", 418, errors.APIError),
    ],
)
def test_a_reply_becomes_the_class_that_was_raised(
    code: str, status: int, expected: type[errors.MemKVError]
) -> None:
    assert errors.error_for(code, status) is expected


def test_the_hint_stands_in_the_message() -> None:
    error = errors.StoreLocked("pid 7 holds the store", hint="stop it first")
    assert str(error) == "pid 7 holds the store (stop it first)"
