"""Options that are a number of bytes: 500M, 2GiB."""

from __future__ import annotations

import rich_click as click

from memkv.config import parse_size


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a size, such as 500M, 20GB or 2GiB", param, ctx)


SIZE = _Size()
