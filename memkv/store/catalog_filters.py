"""A metadata filter as SQL that selects the same documents on both databases."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select

from memkv.store.filters import Comparison, Filter, kind_of
from memkv.store.tables import Document, DocumentValue


def filter_clause(node: Filter, collection_id: str) -> ColumnElement[bool]:
    """True for the documents of the collection that `node` matches."""
    if isinstance(node, Comparison):
        matching = select(DocumentValue.document_id).where(
            DocumentValue.collection_id == collection_id,
            DocumentValue.key == node.key,
            DocumentValue.kind == kind_of(node.values[0]),
            _compare(node),
        )
        return Document.id.in_(matching)
    parts = [filter_clause(part, collection_id) for part in node.parts]
    return and_(*parts) if node.every else or_(*parts)


def _compare(node: Comparison) -> ColumnElement[bool]:
    column: Any = DocumentValue.string if isinstance(node.values[0], str) else DocumentValue.number
    values = [value if isinstance(value, str) else float(value) for value in node.values]
    clause: ColumnElement[bool]
    match node.operator:
        case "eq" | "in":
            clause = column.in_(values)
        case "ne" | "nin":
            clause = column.not_in(values)
        case "gt":
            clause = column > values[0]
        case "gte":
            clause = column >= values[0]
        case "lt":
            clause = column < values[0]
        case _:  # lte
            clause = column <= values[0]
    return clause
