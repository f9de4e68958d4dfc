"""The command line in process, on a tiny random model; and one real server for the commands with --url."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from command_line import COMMAND, SETTINGS, Run

from memkv.cli import main


@pytest.fixture(autouse=True)
def clean_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory and no configuration but a small pool."""
    for name in [name for name in os.environ if name.startswith("MEMKV_") and name != "MEMKV_MODELS_DIR"]:
        monkeypatch.delenv(name)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def models(minilm: Path, tiny_model_dir: Callable[[str], Path]) -> list[str]:
    """Options that choose the tiny model."""
    return ["--model", str(tiny_model_dir("llama")), "--embedder", str(minilm)]


@pytest.fixture
def run() -> Run:
    """`memkv ARGUMENTS` in this process; stdout and stderr apart. A traceback never reaches a user."""

    def invoke(*arguments: str, input: bytes | str | None = None) -> Result:
        result = CliRunner().invoke(main, list(arguments), input=input, prog_name="memkv")
        assert "Traceback" not in result.output, result.output
        return result

    return invoke


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, models: list[str]) -> Iterator[str]:
    """The URL of a server with the tiny model; it must end with exit code 0 when it is told to stop."""
    directory = tmp_path_factory.mktemp("server")
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--data-dir", "data", "--log-level", "warning", "-q", *models],
        cwd=directory,
        env={**os.environ, **SETTINGS},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("memkv listens on http://127.0.0.1:"), line
        yield line.split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
