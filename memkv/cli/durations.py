"""Options that are a number of seconds: 90d, 12h, 30m; never is 0."""

from __future__ import annotations

import re

import rich_click as click

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9})([smhd])")


class _Duration(click.ParamType[int]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if value == "never":
            return 0
        found = _DURATION.fullmatch(str(value))
        seconds = int(found[1]) * _UNITS[found[2]] if found else 0
        if not seconds:
            self.fail(f"{value!r} is not a time, such as 90d, 12h, 30m or never", param, ctx)
        return seconds


DURATION = _Duration()
