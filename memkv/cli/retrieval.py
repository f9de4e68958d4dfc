"""The options that `query` and `search` share: where to look, for what, and how much to bring."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rich_click as click

if TYPE_CHECKING:
    from memkv.wire import Filter


@dataclass(frozen=True, slots=True)
class Retrieval:
    collection: str
    top_k: int | None
    filter: Filter | None
    min_score: float | None


def retrieval_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options of retrieval; they arrive as its `retrieval` argument."""

    @click.option("-c", "--collection", required=True, metavar="NAME", help="Collection to look in.")
    @click.option("-k", "--top-k", type=click.IntRange(1, 1000), help="Chunks to retrieve.  [default: 4]")
    @click.option(
        "--filter",
        "filters",
        multiple=True,
        metavar="KEY=VALUE",
        help='Only documents with this metadata; several must all hold. Or a filter as JSON: {"type": ...}.',
    )
    @click.option("--min-score", type=click.FloatRange(-1, 1), help="Least similarity.  [default: 0]")
    @functools.wraps(command)
    def with_retrieval(
        *args: Any,
        collection: str,
        top_k: int | None,
        filters: tuple[str, ...],
        min_score: float | None,
        **options: Any,
    ) -> object:
        retrieval = Retrieval(collection, top_k, parse_filters(filters), min_score)
        return command(*args, retrieval=retrieval, **options)

    return with_retrieval


def parse_filters(texts: Sequence[str]) -> Filter | None:
    """One filter that holds where every given one holds; None without any."""
    found = [_parse_filter(text) for text in texts]
    if not found:
        return None
    return found[0] if len(found) == 1 else {"type": "and", "filters": found}


def parse_pairs(texts: Sequence[str], option: str) -> dict[str, str | int | float | bool | None]:
    """`KEY=VALUE` texts as metadata: a value that is a JSON number, true, false or null becomes that."""
    return dict(_parse_pair(text, option) for text in texts)


def _parse_filter(text: str) -> Filter:
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise click.BadParameter(
                f'{text!r} is not JSON: {error}. Write it as {{"lang": "en"}}, or as KEY=VALUE.',
                param_hint="--filter",
            ) from error
        return dict(value)
    key, value = _parse_pair(text, "--filter")
    return {"type": "eq", "key": key, "value": value}


def _parse_pair(text: str, option: str) -> tuple[str, str | int | float | bool | None]:
    key, equals, raw = text.partition("=")
    if not key or not equals:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE, such as lang=en", param_hint=option)
    try:
        value = json.loads(raw)
    except ValueError:
        return key, raw
    return key, value if isinstance(value, str | int | float | bool | None) else raw
