"""The commonest mistakes: each is one line that says what is wrong, and one that says how to mend it."""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from command_line import Run


def told(result: Result, exit_code: int, *, error: str, hint: str) -> None:
    """Nothing on stdout; on stderr one line of each kind, which holds these words."""
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert result.exit_code == exit_code, result.output
    assert [line.split(":")[0] for line in lines] == ["error", "hint"], result.output
    assert error in lines[0]
    assert hint in lines[1]
    assert result.stdout == ""


def test_no_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKV_MODELS_DIR", "nothing-here")
    result = run("search", "lamp", "-c", "books", "-q")
    told(result, 1, error="is not installed", hint="memkv models install smollm2-135m-instruct")


def test_an_unknown_model(run: Run, minilm: Path) -> None:
    result = run("search", "lamp", "-c", "books", "--model", "smolm", "--embedder", str(minilm), "-q")
    told(result, 1, error="smolm", hint="--model")


def test_port_taken(run: Run, models: list[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = run("serve", "--port", str(port), *models)
    told(result, 2, error=f"127.0.0.1:{port} is taken", hint=f"--port {port + 1}")


def test_an_address_that_others_reach(run: Run, models: list[str]) -> None:
    result = run("serve", "--host", "0.0.0.0", "--port", "0", *models)
    told(result, 2, error="0.0.0.0", hint="--insecure")


def test_missing_migration(run: Run, models: list[str]) -> None:
    run("db", "upgrade", "--data-dir", "data")
    with sqlite3.connect("data/memkv.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'older'")
    result = run("search", "lamp", "-c", "books", "--data-dir", "data", "-q", *models)
    told(result, 1, error="the database has schema older", hint="memkv")
    assert run("db", "current", "--data-dir", "data").exit_code == 1


def test_server_down(run: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    result = run("search", "lamp", "-c", "books", "--url", url)
    told(result, 4, error=f"no server answers at {url}", hint="memkv serve")


def test_unknown_config_key(run: Run) -> None:
    Path("memkv.toml").write_text("[query]\ntopk = 3\n")
    result = run("search", "lamp", "-c", "books")
    told(result, 2, error="query.topk", hint="query.top_k")


@pytest.mark.parametrize(
    "command", [("config", "show"), ("query", "When?", "-c", "books"), ("doctor",), ("serve", "--port", "0")]
)
def test_a_policy_that_does_not_exist(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MEMKV_QUERY__POLICY", "zz")
    told(run(*command), 2, error="query.policy = 'zz' (MEMKV_QUERY__POLICY)", hint="auto, exact")


def test_every_policy_can_be_configured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in ("auto", "exact", "map", "head:2"):
        monkeypatch.setenv("MEMKV_QUERY__POLICY", policy)
        assert "query.policy" in run("config", "show").stdout


def test_store_locked_by_another_process(run: Run, models: list[str]) -> None:
    run("db", "upgrade", "--data-dir", "data")
    code = (
        "import sys; from pathlib import Path; from memkv.store import Store\n"
        "with Store.open(Path('data')): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        result = run("search", "lamp", "-c", "books", "--data-dir", "data", "-q", *models)
        told(result, 1, error=str(holder.pid), hint="stop")


def test_wrong_dtype(run: Run, monkeypatch: pytest.MonkeyPatch, models: list[str]) -> None:
    monkeypatch.setenv("MEMKV_KV__DTYPE", "int4")
    result = run("search", "lamp", "-c", "books", *models)
    told(result, 2, error="kv.dtype = 'int4'", hint="bfloat16")


def test_disk_full_while_ingesting(run: Run, monkeypatch: pytest.MonkeyPatch, models: list[str]) -> None:
    Path("light.md").write_text("The lamp is lit before sunset.\n")
    where = ["--data-dir", "data", *models]
    run("collections", "create", "books", *where)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        result = run("ingest", "light.md", "-c", "books", "-q", "--format", "table", *where)
    told(result, 1, error="full", hint="free")
    assert run("ingest", "light.md", "-c", "books", *where).exit_code == 0


def test_disk_full_at_init(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = os.statvfs(".")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": usage.f_bsize}))
    told(run("init", "-q"), 1, error="free on the disk", hint="--data-dir")


def test_empty_file(run: Run, models: list[str]) -> None:
    Path("empty.txt").write_text("")
    result = run("ingest", "empty.txt", "-c", "books", "-q", "--data-dir", "data", *models)
    told(result, 1, error="empty.txt", hint="")


def test_missing_file_is_told_before_anything_is_loaded(run: Run) -> None:
    result = run("ingest", "missing.txt", "-c", "books", "-q", "--model", "no-such-model")
    told(result, 1, error="missing.txt: no such file", hint="path")


def test_a_directory_without_text(run: Run) -> None:
    Path("pictures").mkdir()
    result = run("ingest", "pictures", "-c", "books", "-q", "--model", "no-such-model")
    told(result, 1, error="pictures: no file matches", hint="--glob")


def test_unknown_collection(run: Run, models: list[str]) -> None:
    result = run("query", "When?", "-c", "boks", "-q", "--data-dir", "data", *models)
    told(result, 1, error="boks", hint="memkv collections")


@pytest.mark.parametrize(
    ("command", "error"), [("query", "the question is empty"), ("search", "query: must not be empty")]
)
def test_an_empty_question(run: Run, models: list[str], command: str, error: str) -> None:
    result = run(command, "", "-c", "books", "-q", "--data-dir", "data", *models)
    told(result, 2, error=error, hint="")
    assert "memkv.wire" not in result.stderr
    assert "`str`" not in result.stderr


def test_server_and_embedded_options_together(run: Run) -> None:
    result = run("search", "lamp", "-c", "books", "--url", "http://127.0.0.1:1", "--data-dir", "data")
    assert result.exit_code == 2
    assert "--data-dir" in result.output


def test_doctor_names_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKV_MODELS_DIR", "nothing-here")
    result = run("doctor")
    assert result.exit_code == 1
    assert "fix: memkv models install smollm2-135m-instruct" in result.stdout


def test_doctor_finds_two_packages_that_are_called_faiss(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.metadata.packages_distributions", lambda: {"faiss": ["faiss-gpu-cu12", "faiss-cpu"]}
    )
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip uninstall -y faiss-cpu faiss-gpu-cu12" in result.stdout


def test_doctor_finds_nothing_wrong_here(run: Run, smollm2: Path, minilm: Path) -> None:
    result = run("doctor")
    assert "✗" not in result.stdout, result.stdout
    assert result.exit_code == 0
