"""What is refused before it reaches SQL; what is accepted comes back the same from both databases."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import new_collection

from memkv.errors import BadRequestError, MemKVError, UnprocessableDocumentError
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.ids import ID_PATTERN, new_id
from memkv.store.plain_values import MAX_INTEGER, checked_metadata, checked_name
from memkv.store.rows import CollectionRow, NewDocument

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    "value",
    [
        {"a": "x\0y"},
        {"a\0": 1},
        {"a": "\ud800"},
        {"\udfff": 1},
        {"a": MAX_INTEGER + 1},
        {"a": -(2**63)},
        {"a": 10**400},
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": {1: 2}},
        {"a": object()},
        {"a": b"bytes"},
        {"a": "x" * 70_000},
        {"k" * 257: 1},
        [],
        "text",
        None,
    ],
)
def test_metadata_that_a_database_would_choke_on_is_refused(value: Any) -> None:
    with pytest.raises(BadRequestError):
        checked_metadata("metadata", value)


def test_metadata_nested_without_end_is_refused() -> None:
    tree: Any = 1
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(BadRequestError, match="nested too deeply"):
        checked_metadata("metadata", {"a": tree})


@given(st.dictionaries(st.text(), JSON, max_size=4))
@settings(max_examples=100, deadline=None)
def test_metadata_is_refused_or_survives_json(value: dict[str, Any]) -> None:
    try:
        checked = checked_metadata("metadata", value)
    except BadRequestError:
        return
    assert json.loads(json.dumps(checked)) == value
    assert list(checked) == sorted(checked)


@pytest.mark.parametrize("name", ["", " ", ".", "..", "-a", "a/b", "a b", "a\0b", "a\n", "x" * 129, "\ud800"])
def test_names_that_no_path_can_hold_are_refused(name: str) -> None:
    with pytest.raises(BadRequestError):
        checked_name("the name", name)


@pytest.mark.parametrize("name", ["a", "A-1.b_c", "名前", "x" * 128])
def test_names_with_letters_of_any_script_are_accepted(name: str) -> None:
    assert checked_name("the name", name) == name


def test_ids_are_unique_and_look_like_uuid7() -> None:
    ids = {new_id("doc") for _ in range(2000)}
    assert len(ids) == 2000
    for one in ids:
        assert ID_PATTERN.match(one)
        body = one.removeprefix("doc_")
        assert body[12] == "7"
        assert body[16] in "89ab"


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "\0"])
def test_texts_that_postgresql_refuses_are_refused_everywhere(
    store: Store, collection: CollectionRow, text: str
) -> None:
    with pytest.raises(UnprocessableDocumentError):
        store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument(text)])
    for field in ("external_id", "title", "filename", "media_type"):
        with pytest.raises(BadRequestError):
            store.accept_documents(DEFAULT_TENANT, collection.id, [NewDocument("x", **{field: text})])
    for lookup in (
        lambda: store.catalog.get_document(DEFAULT_TENANT, collection.id, text),
        lambda: store.catalog.get_collection(DEFAULT_TENANT, text),
        lambda: store.jobs.get(DEFAULT_TENANT, text),
        lambda: store.catalog.create_collection(DEFAULT_TENANT, new_collection(text)),
    ):
        with pytest.raises(MemKVError):
            lookup()


def test_texts_and_metadata_come_back_as_they_went_in(store: Store, collection: CollectionRow) -> None:
    # One store for all examples: each adds one document.
    @given(st.text(max_size=50), st.dictionaries(st.text(max_size=5), JSON, max_size=3))
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    def roundtrip(text: str, metadata: dict[str, Any]) -> None:
        try:
            accepted = store.accept_documents(
                DEFAULT_TENANT, collection.id, [NewDocument(text, title=text, metadata=metadata)]
            )
        except (BadRequestError, UnprocessableDocumentError):
            return
        row = store.catalog.document_by_id(DEFAULT_TENANT, accepted.documents[0].document.id)
        assert (row.title, row.metadata) == (text, metadata)
        assert store.catalog.document_text(DEFAULT_TENANT, row.id) == (1, text)
        assert row.text_bytes == len(text.encode())

    roundtrip()
