"""What a command that works on a data directory itself does otherwise than a server."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from memkv.cli.output import Output
from memkv.cli.target import Target
from memkv.sdk.client import MemKV


@pytest.mark.parametrize(
    ("name", "setting", "expected"),
    [
        ("compile", "", False),
        ("compile", "true", True),
        ("compile", "false", False),
        ("host_share", "", 0.0),
        ("host_share", "0.5", 0.5),
    ],
)
def test_a_single_command_prepares_for_many_only_where_it_is_told_to(
    name: str, setting: str, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting:
        monkeypatch.setenv(f"MEMKV_ENGINE__{name.upper()}", setting)
    seen: list[Any] = []
    monkeypatch.setattr(MemKV, "local", lambda **given: seen.append(given["config"]) or nullcontext())
    flags = {"store.data_dir": str(tmp_path), "model.model": None, "model.embedder": None}
    with Target("", flags, None).open(Output(quiet=True)):
        pass
    assert getattr(seen[0].engine, name) == expected
    assert seen[0].store.data_dir == str(tmp_path)
