"""`memkv keys`: on a data directory, beside its server, and through it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import httpx2
import pytest
from command_line import COMMAND, SETTINGS, Run

HERE = ("--data-dir", "data", "--format", "json")


def made(run: Run, *more: str) -> dict[str, Any]:
    result = run("keys", "create", *more, *HERE)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_key_on_a_data_directory(run: Run) -> None:
    refused = run("keys", "create", *HERE)
    assert refused.exit_code == 1
    assert "--scope admin" in refused.stderr
    admin = made(run, "--scope", "admin", "--name", "ops")
    reader = made(run, "-c", "wiki", "-c", "papers", "--expires", "90d")
    assert (admin["scope"], admin["collections"], admin["expires_at"]) == ("admin", None, "")
    assert (reader["scope"], reader["collections"]) == ("read", ["papers", "wiki"])
    listed = run("keys", "list", "--data-dir", "data")
    assert f"{admin['id']}  ops   {admin['prefix']}...  admin  all" in listed.stdout
    assert "papers, wiki" in listed.stdout
    for secret in (admin["secret"], reader["secret"]):
        assert secret not in listed.output
        assert secret not in run("keys", "show", reader["id"], *HERE).output
    changed = run("keys", "update", reader["id"], "--scope", "write", "--expires", "never", *HERE)
    assert json.loads(changed.stdout)["expires_at"] == ""
    rotated = json.loads(run("keys", "rotate", reader["id"], *HERE).stdout)
    assert rotated["secret"] not in ("", reader["secret"])
    assert run("keys", "revoke", reader["id"], *HERE, input="n\n").exit_code == 1
    assert run("keys", "revoke", reader["id"], "--yes", *HERE).exit_code == 0
    assert run("keys", "show", "key_0", *HERE).exit_code == 1


def test_a_secret_is_shown_once_and_said_to_be(run: Run) -> None:
    shown = run("keys", "create", "--scope", "admin", "--expires", "12h", "--data-dir", "data")
    assert shown.stdout.count("mkv_") == 1
    assert "not shown again" in shown.stderr
    assert "no key of scope admin outlasts this one" in " ".join(shown.stderr.split())


def test_the_last_admin_key(run: Run) -> None:
    admin = made(run, "--scope", "admin")
    refused = run("keys", "revoke", admin["id"], "--yes", *HERE)
    assert refused.exit_code == 1
    assert "on the data directory itself" in refused.stderr
    gone = run("keys", "revoke", admin["id"], "--yes", "--force", *HERE)
    assert gone.exit_code == 0
    assert "memkv keys create --scope admin" in gone.stderr
    assert made(run, "--scope", "admin")["status"] == "valid"


@pytest.mark.parametrize("time", ["", "0d", "soon", "90", "-1d", "1.5h", "9999999999d"])
def test_no_time(run: Run, time: str) -> None:
    result = run("keys", "create", "--scope", "admin", "--expires", time, *HERE)
    assert result.exit_code == 2
    assert "90d" in result.stderr


def test_a_key_is_for_a_server(run: Run) -> None:
    result = run("keys", "list", "--api-key", "mkv_0", *HERE)
    assert result.exit_code == 2
    assert "--api-key" in result.stderr
    assert "mkv_0" not in result.stderr


def test_beside_a_server_and_through_it(run: Run, models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that listens for other machines needs a key; one that is made beside it counts at once."""
    serve = ["serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", "data", "-q", *models]
    refused = run(*serve)
    assert refused.exit_code == 2
    assert "memkv keys create --scope admin" in refused.stderr
    admin = made(run, "--scope", "admin")
    process = subprocess.Popen(
        [*COMMAND, *serve],
        env={**os.environ, **SETTINGS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1].replace("0.0.0.0", "127.0.0.1")
        assert httpx2.get(f"{url}/v1/info").status_code == 401
        told = run("collections", "list", "--url", url)
        assert told.exit_code == 1
        assert "MEMKV_API_KEY" in told.stderr
        assert run("collections", "list", "--url", url, "--api-key", admin["secret"]).exit_code == 0
        monkeypatch.setenv("MEMKV_API_KEY", admin["secret"])
        assert run("collections", "create", "wiki", "--url", url).exit_code == 0
        through = json.loads(run("keys", "create", "--url", url, "--format", "json").stdout)
        beside = made(run)
        assert run("store", "stats", "--url", url, "--api-key", beside["secret"]).exit_code == 1
        for key in (through, beside):
            assert run("collections", "list", "--url", url, "--api-key", key["secret"]).exit_code == 0
            assert run("keys", "revoke", key["id"], "--yes", *HERE).exit_code == 0
            assert run("collections", "list", "--url", url, "--api-key", key["secret"]).exit_code == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
    assert process.stderr is not None
    log = process.stderr.read()
    for key in (admin, through, beside):
        assert key["secret"] not in log
