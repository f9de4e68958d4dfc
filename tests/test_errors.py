"""The exception tree: what its docstring draws, what a status and a code become."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from memkv import errors

ROOT = Path(__file__).parent.parent


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


def raised_without_a_hint(path: Path) -> Iterator[str]:
    """Constructors of errors in a module that give no hint, of classes that have no remedy of their own."""
    classes = {cls.__name__: cls for cls in errors.error_classes().values()}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
            hinted = any(keyword.arg == "hint" for keyword in node.keywords)
            if not hinted and not classes[node.func.id].remedy:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.func.id}"


def test_whoever_raises_an_error_says_how_to_mend_it() -> None:
    """Kernels and engine are called by memkv itself: what they refuse, no user has given."""
    modules = [path for part in ("memkv", "api") for path in (ROOT / part).rglob("*.py")]
    inner = {ROOT / "memkv" / "kernels", ROOT / "memkv" / "engine"}
    reachable = [path for path in modules if not inner & {*path.parents}]
    assert len(reachable) > 100
    assert [found for path in reachable for found in raised_without_a_hint(path)] == []


def test_a_class_that_is_always_mended_alike_says_so_itself() -> None:
    assert errors.CollectionNotFound("collection 'a' does not exist").hint == errors.CollectionNotFound.remedy
    assert errors.CollectionNotFound("gone", hint="look again").hint == "look again"


def test_the_hint_stands_in_the_message() -> None:
    error = errors.StoreLocked("pid 7 holds the store", hint="stop it first")
    assert str(error) == "pid 7 holds the store (stop it first)"
