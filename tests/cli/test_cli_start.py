"""What the command line does before anything heavy is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import COMMAND, Run

from memkv import __version__
from memkv.cli import main
from memkv.cli.settings import MEANING, file_text
from memkv.config import Config, load_config

HEAVY = ("torch", "transformers", "sqlalchemy", "faiss", "litestar", "numpy", "httpx2", "msgspec")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from memkv.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted(set(sys.argv[1:]) & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code, *HEAVY], capture_output=True, text=True, check=True)
    assert "Usage" in result.stdout
    assert result.stderr.strip() == "[]"


def test_help_answers_at_once() -> None:
    """0.2 s of processor time when it was written; the bound leaves room for slower machines."""
    before = os.times()
    for _ in range(3):
        subprocess.run([*COMMAND, "--help"], capture_output=True, check=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used / 3 < 0.6


def test_every_command_has_a_page_of_help(run: Run) -> None:
    def walk(command: object, path: list[str]) -> None:
        result = run(*path, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.output
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, [*path, name])

    walk(main, [])
    assert set(main.commands) == {
        *("init", "serve", "demo", "ingest", "query", "search", "collections", "documents", "jobs"),
        *("store", "keys", "db", "models", "config", "bench", "eval", "doctor", "version"),
    }


def test_version(run: Run) -> None:
    assert run("--version").output == f"memkv {__version__}\n"
    assert json.loads(run("version", "--format", "json").stdout)["memkv"] == __version__


def test_a_wrong_command_is_a_usage_error_with_the_nearest_name(run: Run) -> None:
    result = run("colections", "list")
    assert result.exit_code == 2
    assert "collections" in result.output


def test_config_show_tells_value_and_origin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("memkv.toml").write_text("[query]\ntop_k = 7\n")
    monkeypatch.setenv("MEMKV_PORT", "9001")
    rows = json.loads(run("config", "show", "--origin", "--format", "json").stdout)
    found = {row["key"]: (row["value"], row["origin"]) for row in rows}
    assert found["query.top_k"] == (7, "memkv.toml")
    assert found["server.port"] == (9001, "MEMKV_PORT")
    assert found["server.host"] == ("127.0.0.1", "default")


def test_config_show_hides_the_password_of_the_database(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKV_DATABASE_URL", "postgresql://ada:secret@db.example/memkv")
    output = run("config", "show").output
    assert "postgresql://ada:***@db.example/memkv" in output
    assert "secret" not in output


def test_every_key_has_a_meaning_and_the_written_file_is_the_default() -> None:
    assert set(MEANING) == {key for key, _, _ in Config().items()}
    chosen = {key: value for key, value, _ in Config().items()}
    Path("all.toml").write_text(file_text(chosen))
    read = load_config(env={}, file=Path("all.toml"))
    assert {key: value for key, value, _ in read.items()} == chosen
    assert len(tomllib.loads(file_text({}))) == len({key.split(".")[0] for key in MEANING})


def test_init_writes_a_file_once(run: Run) -> None:
    first = run("init", "--data-dir", "kept", "--format", "json")
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["config_written"] is True
    assert Path("kept").is_dir()
    assert load_config(env={}).store.data_dir == "kept"
    Path("memkv.toml").write_text("[store]\ndata_dir = 'mine'\n")
    again = run("init", "--format", "json")
    assert json.loads(again.stdout)["config_written"] is False
    assert Path("memkv.toml").read_text() == "[store]\ndata_dir = 'mine'\n"
    assert Path("mine").is_dir()


def test_init_tells_what_a_token_takes(run: Run, models: list[str]) -> None:
    result = run("init", "--format", "json", *models)
    shape = json.loads((Path(models[1]) / "config.json").read_text())
    per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2
    assert json.loads(result.stdout)["kv_bytes_per_token"] == per_token


def test_output_stops_quietly_when_its_reader_goes(tmp_path: Path) -> None:
    command = [*COMMAND, "config", "show", "--origin"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait(timeout=20)


def test_ctrl_c_ends_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memkv.config.load_config", interrupted)
    result = run("config", "show")
    assert result.exit_code == 130
    assert result.output.strip() == "interrupted"


def test_an_unknown_exception_is_short_unless_debug_is_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("memkv.config.load_config", broken)
    result = run("config", "show")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "error: ZeroDivisionError: division by zero"
    assert "--debug" in result.stderr.splitlines()[1]


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "--debug", "config", "show", "--config", "none.toml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "error: cannot read none.toml" in result.stderr
