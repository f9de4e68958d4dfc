"""Metadata filters: a small tree, parsed strictly.

    {"type": "eq" | "ne" | "gt" | "gte" | "lt" | "lte", "key": "year", "value": 2024}
    {"type": "in" | "nin", "key": "lang", "value": ["en", "de"]}
    {"type": "and" | "or", "filters": [...]}
    {"lang": "en", "year": 2024}                       every key equal

A comparison looks at the values of its own kind only (string, number, boolean): where a document lacks the
key, or holds another kind under it, no operator matches, `ne` and `nin` included. Strings are ordered by
code point. The catalog turns the tree into SQL that means the same on both databases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from memkv.errors import FilterError
from memkv.store.plain_values import MAX_KEY_CHARS, Scalar, checked_scalar, checked_text

Operator = Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]

OPERATORS: tuple[Operator, ...] = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin")
JUNCTIONS = ("and", "or")
MAX_DEPTH = 16
MAX_COMPARISONS = 100
MAX_VALUES = 1000  # of one `in` or `nin`


@dataclass(frozen=True, slots=True)
class Comparison:
    operator: Operator
    key: str
    values: tuple[Scalar, ...]  # one value, or those of `in` and `nin`; all of one kind


@dataclass(frozen=True, slots=True)
class Junction:
    every: bool  # and; else or
    parts: tuple[Filter, ...]


Filter = Comparison | Junction


def parse_filter(source: object) -> Filter | None:
    """The filter that `source` describes; None where it asks for nothing (None or `{}`).

    Raises:
        FilterError: for anything outside the grammar.
    """
    if source is None or source == {}:
        return None
    parsed = _parse(source, depth=1)
    count = _count(parsed)
    if count > MAX_COMPARISONS:
        raise FilterError(f"the filter has {count} comparisons", hint=f"at most {MAX_COMPARISONS}")
    return parsed


def _parse(source: object, *, depth: int) -> Filter:
    if depth > MAX_DEPTH:
        raise FilterError("the filter is nested too deeply", hint=f"at most {MAX_DEPTH} levels")
    if not isinstance(source, Mapping) or not source:
        raise FilterError("a filter is an object", hint='{"type": "eq", "key": "lang", "value": "en"}')
    if not _is_grammar(source):
        return _parse_plain(source)
    kind = source.get("type")
    if kind in JUNCTIONS:
        return _parse_junction(source, depth=depth)
    if kind in OPERATORS:
        return _parse_comparison(source)
    raise FilterError(
        f"filter type {kind!r} is not known", hint="one of " + ", ".join((*OPERATORS, *JUNCTIONS))
    )


def _is_grammar(source: Mapping[object, object]) -> bool:
    """Whether `source` speaks the grammar; a plain dict may well have a key called `type`."""
    kind = source.get("type")
    return isinstance(kind, str) and (
        kind in OPERATORS or kind in JUNCTIONS or "key" in source or "filters" in source
    )


def _parse_plain(source: Mapping[object, object]) -> Filter:
    parts = tuple(Comparison("eq", _key(key), (_scalar(key, value),)) for key, value in source.items())
    return parts[0] if len(parts) == 1 else Junction(True, parts)


def _parse_junction(source: Mapping[object, object], *, depth: int) -> Junction:
    _require_only(source, "type", "filters")
    parts = source["filters"]
    if not isinstance(parts, list | tuple) or not parts:
        raise FilterError(
            f"`filters` of {source['type']!r} is not a list of filters", hint="give at least one filter in it"
        )
    if len(parts) > MAX_COMPARISONS:
        raise FilterError(f"the filter has {len(parts)} parts", hint=f"at most {MAX_COMPARISONS}")
    return Junction(source["type"] == "and", tuple(_parse(part, depth=depth + 1) for part in parts))


def _parse_comparison(source: Mapping[object, object]) -> Comparison:
    _require_only(source, "type", "key", "value")
    operator = next(known for known in OPERATORS if known == source["type"])
    key = _key(source["key"])
    value = source["value"]
    if operator in ("in", "nin"):
        if not isinstance(value, list | tuple) or not value:
            raise FilterError(
                f"the value of {operator!r} is not a list of values", hint="give at least one value in it"
            )
        if len(value) > MAX_VALUES:
            raise FilterError(f"{operator!r} has {len(value)} values", hint=f"at most {MAX_VALUES}")
        values = tuple(_scalar(key, part) for part in value)
        if len({kind_of(part) for part in values}) > 1:
            raise FilterError(f"the values of {operator!r} are of several kinds", hint="use one kind")
        return Comparison(operator, key, values)
    only = _scalar(key, value)
    if isinstance(only, bool) and operator not in ("eq", "ne"):
        raise FilterError(f"{operator!r} cannot order booleans", hint="eq or ne")
    return Comparison(operator, key, (only,))


def kind_of(value: Scalar) -> Literal["string", "number", "boolean"]:
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def _require_only(source: Mapping[object, object], *names: str) -> None:
    missing = [name for name in names if name not in source]
    if missing:
        raise FilterError(
            f"the filter {source.get('type')!r} lacks {', '.join(missing)}", hint=f"it has {', '.join(names)}"
        )
    unknown = [str(name) for name in source if name not in names]
    if unknown:
        raise FilterError(
            f"the filter has unknown fields: {', '.join(sorted(unknown))[:200]}",
            hint=f"{source.get('type')!r} has {', '.join(names)}",
        )


def _key(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise FilterError("a filter's key is a metadata key", hint="give a string that is not empty")
    return checked_text("a filter's key", key, max_chars=MAX_KEY_CHARS, error=FilterError)


def _scalar(key: object, value: object) -> Scalar:
    return checked_scalar(f"the filter's value for {str(key)[:64]!r}", value)


def _count(node: Filter) -> int:
    return 1 if isinstance(node, Comparison) else sum(_count(part) for part in node.parts)
