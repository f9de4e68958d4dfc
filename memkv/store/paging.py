"""One page of any list that is ordered by id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Select
from sqlalchemy.orm import InstrumentedAttribute

from memkv.store.plain_values import checked_text
from memkv.store.rows import Page, PageRequest

Item = TypeVar("Item")


def read_page(
    connection: Connection,
    statement: Select[*tuple[Any, ...]],
    request: PageRequest,
    *,
    order_by: InstrumentedAttribute[str],
    make: Callable[..., Item],
) -> Page[Item]:
    """Runs `statement` for one page; `make` is called with each row's columns."""
    towards_larger = (request.order == "asc") == (request.before is None)
    larger_than, smaller_than = request.after, request.before
    if request.order == "desc":
        larger_than, smaller_than = smaller_than, larger_than
    if larger_than is not None:
        statement = statement.where(order_by > checked_text("the page's cursor", larger_than, max_chars=256))
    if smaller_than is not None:
        statement = statement.where(order_by < checked_text("the page's cursor", smaller_than, max_chars=256))
    statement = statement.order_by(order_by.asc() if towards_larger else order_by.desc())
    found = connection.execute(statement.limit(request.limit + 1)).all()
    rows = [make(*row) for row in found[: request.limit]]
    if request.before is not None:
        rows.reverse()
    return Page(tuple(rows), has_more=len(found) > request.limit)
