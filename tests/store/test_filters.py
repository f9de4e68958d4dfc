"""Metadata filters: the grammar, and that SQL selects what the words say on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import new_collection

from memkv.errors import FilterError
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.filters import Comparison, Filter, Junction, kind_of, parse_filter
from memkv.store.rows import CollectionRow, NewDocument, PageRequest


def deep(levels: int) -> Any:
    tree: Any = {"type": "eq", "key": "a", "value": 1}
    for _ in range(levels):
        tree = {"type": "and", "filters": [tree]}
    return tree


@pytest.mark.parametrize(
    "source",
    [
        [],
        "lang",
        1,
        {"type": "eq"},
        {"type": "eq", "key": "a"},
        {"type": "eq", "value": 1},
        {"type": "eq", "key": "a", "value": None},
        {"type": "eq", "key": "a", "value": [1]},
        {"type": "eq", "key": "a", "value": {}},
        {"type": "eq", "key": "", "value": 1},
        {"type": "eq", "key": 1, "value": 1},
        {"type": "eq", "key": "a", "value": 1, "extra": 1},
        {"type": "eq", "key": "a", "value": 2**63},
        {"type": "eq", "key": "a", "value": float("nan")},
        {"type": "eq", "key": "a", "value": "x\0"},
        {"type": "eq", "key": "\ud800", "value": "x"},
        {"type": "gt", "key": "a", "value": True},
        {"type": "in", "key": "a", "value": "x"},
        {"type": "in", "key": "a", "value": []},
        {"type": "in", "key": "a", "value": [1, "x"]},
        {"type": "in", "key": "a", "value": [1, True]},
        {"type": "in", "key": "a", "value": list(range(1001))},
        {"type": "near", "key": "a", "value": 1},
        {"type": "and"},
        {"type": "and", "filters": []},
        {"type": "and", "filters": {}},
        {"type": "and", "filters": [[]]},
        {"type": "and", "filters": [{"type": "eq", "key": "a", "value": 1}] * 101},
        {"type": "not", "filters": [{"a": 1}]},
        {"lang": ["en"]},
        {"lang": None},
        {"": 1},
        deep(16),
        deep(100_000),
    ],
)
def test_everything_outside_the_grammar_is_a_filter_error(source: Any) -> None:
    with pytest.raises(FilterError) as caught:
        parse_filter(source)
    assert caught.value.hint


@pytest.mark.parametrize("source", [None, {}])
def test_nothing_asked_is_no_filter(source: Any) -> None:
    assert parse_filter(source) is None


def test_a_plain_object_means_equality() -> None:
    assert parse_filter({"lang": "en"}) == Comparison("eq", "lang", ("en",))
    assert parse_filter({"type": "pdf"}) == Comparison("eq", "type", ("pdf",))
    assert parse_filter({"a": 1, "b": True}) == Junction(
        True, (Comparison("eq", "a", (1,)), Comparison("eq", "b", (True,)))
    )


# A handful of values that are easily mixed up: 1, 1.0, True and "1"; strings that collations order otherwise.
VALUES: list[Any] = [0, 1, 2, -1, 1.0, 1.5, True, False, "1", "", "a", "B", "b", "é", "e", "Z", "中", "a b"]
ODD: list[Any] = [None, ["a"], {"x": 1}]
DOCUMENTS: list[dict[str, Any]] = [
    {},
    *({"k": value} for value in [*VALUES, *ODD]),
    {"k": "a", "j": 2},
    {"j": "a"},
    {"k": 2, "j": True},
]

scalars = st.sampled_from(VALUES)
leaves = st.builds(
    lambda operator, key, value: {"type": operator, "key": key, "value": value},
    st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte"]),
    st.sampled_from(["k", "j", "missing"]),
    scalars,
) | st.builds(
    lambda operator, key, values: {"type": operator, "key": key, "value": values},
    st.sampled_from(["in", "nin"]),
    st.sampled_from(["k", "j"]),
    st.lists(scalars, min_size=1, max_size=3),
)
trees = st.recursive(
    leaves,
    lambda inner: st.builds(
        lambda kind, parts: {"type": kind, "filters": parts},
        st.sampled_from(["and", "or"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)


def matches(node: Filter, metadata: dict[str, Any]) -> bool:
    """The words of `memkv.store.filters`, in Python."""
    if isinstance(node, Junction):
        parts = [matches(part, metadata) for part in node.parts]
        return all(parts) if node.every else any(parts)
    value = metadata.get(node.key)
    if not isinstance(value, str | bool | int | float) or kind_of(value) != kind_of(node.values[0]):
        return False
    wanted: Any = node.values[0]
    found: Any = value
    return {
        "eq": lambda: found in node.values,
        "in": lambda: found in node.values,
        "ne": lambda: found not in node.values,
        "nin": lambda: found not in node.values,
        "gt": lambda: found > wanted,
        "gte": lambda: found >= wanted,
        "lt": lambda: found < wanted,
        "lte": lambda: found <= wanted,
    }[node.operator]()


def test_sql_selects_what_the_filter_says(store: Store, collection: CollectionRow) -> None:
    added = store.accept_documents(
        DEFAULT_TENANT,
        collection.id,
        [
            NewDocument(f"text {number}", metadata=metadata, external_id=f"d{number}")
            for number, metadata in enumerate(DOCUMENTS)
        ],
    )
    other = store.catalog.create_collection(DEFAULT_TENANT, new_collection("other"))
    store.accept_documents(DEFAULT_TENANT, other.id, [NewDocument("foreign", metadata={"k": 1, "j": 2})])
    assert len(added.documents) == len(DOCUMENTS)

    @given(trees)
    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    def check(source: dict[str, Any]) -> None:
        try:
            node = parse_filter(source)
        except FilterError:
            return
        assert node is not None
        page = store.catalog.list_documents(
            DEFAULT_TENANT, collection.id, PageRequest(limit=100), matching=node
        )
        found = {row.external_id for row in page.rows}
        assert found == {f"d{n}" for n, metadata in enumerate(DOCUMENTS) if matches(node, metadata)}

    check()


def test_changed_metadata_is_what_filters_see(store: Store, collection: CollectionRow) -> None:
    def found(source: Any) -> int:
        node = parse_filter(source)
        page = store.catalog.list_documents(DEFAULT_TENANT, collection.id, PageRequest(), matching=node)
        return len(page.rows)

    for metadata in ({"lang": "en", "year": 2001}, {"lang": "de"}):
        store.accept_documents(
            DEFAULT_TENANT, collection.id, [NewDocument("x", external_id="a", metadata=metadata)]
        )
    assert (found({"lang": "en"}), found({"lang": "de"}), found({"year": 2001})) == (0, 1, 0)
