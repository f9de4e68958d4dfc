"""What a command that works on a data directory itself does otherwise than a server."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from memkv.cli.output import Output
from memkv.cli.target import Target
from memkv.sdk.client import MemKV


@pytest.mark.parametrize(("setting", "compiles"), [("", False), ("true", True), ("false", False)])
def test_a_single_command_compiles_only_where_it_is_told_to(
    setting: str, compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting:
        monkeypatch.setenv("MEMKV_ENGINE__COMPILE", setting)
    seen: list[Any] = []
    monkeypatch.setattr(MemKV, "local", lambda **given: seen.append(given["config"]) or nullcontext())
    flags = {"store.data_dir": str(tmp_path), "model.model": None, "model.embedder": None}
    with Target("", flags, None).open(Output(quiet=True)):
        pass
    assert seen[0].engine.compile is compiles
    assert seen[0].store.data_dir == str(tmp_path)
