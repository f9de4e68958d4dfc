"""The options of every `list`: how many rows, and after which one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import rich_click as click


@dataclass(frozen=True, slots=True)
class PageOptions:
    limit: int
    after: str
    order: Literal["asc", "desc"]


def page_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command `--limit`, `--after` and `--order`; they arrive as its `page` argument."""

    @click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Rows at most.")
    @click.option("--after", default="", metavar="ID", help="Begin after the row with this id.")
    @click.option(
        "--order", type=click.Choice(["asc", "desc"]), default="asc", show_default=True, help="By age."
    )
    @functools.wraps(command)
    def with_page(
        *args: Any, limit: int, after: str, order: Literal["asc", "desc"], **options: Any
    ) -> object:
        return command(*args, page=PageOptions(limit, after, order), **options)

    return with_page
