"""`memkv db` and `memkv doctor --fix`: the database looked at, copied, and brought to and fro."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from memkv.store import schema

WHERE = ["--data-dir", "data"]


def answer(run: Run, *arguments: str, exit_code: int = 0) -> Any:
    result = run(*arguments, *WHERE, "--format", "json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def database(run: Run) -> Path:
    assert run("db", "upgrade", *WHERE).exit_code == 0
    return Path("data/memkv.db")


def test_a_sound_database_passes(run: Run, database: Path) -> None:
    found = answer(run, "db", "check")
    assert found["problems"] == []
    assert found["settings"]["synchronous"] == 2
    assert found["bytes"] >= database.stat().st_size > 0
    assert "no problems" in run("db", "check", *WHERE).stdout


def test_a_schema_that_is_not_memkvs_is_told_table_by_table(run: Run, database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("DROP INDEX ix_chunks_collection_id")
        connection.execute("INSERT INTO chunks SELECT * FROM chunks")
    found = answer(run, "db", "check", exit_code=1)
    assert any("ix_chunks_collection_id" in problem for problem in found["problems"])


def test_damage_is_told(run: Run, database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        connection.execute("INSERT INTO kv_uses VALUES ('key', 'nobody', 1, 1)")
    found = answer(run, "db", "check", exit_code=1)
    assert any("kv_uses" in problem for problem in found["problems"])


def test_a_backup_is_made_beside_a_running_server(run: Run, database: Path) -> None:
    from memkv.store import Store

    with Store.open(Path("data")):
        assert answer(run, "db", "backup", "copy.db", "--dry-run")["bytes"] > 0
        assert not Path("copy.db").exists()
        made = answer(run, "db", "backup", "copy.db")
    assert made["bytes"] == Path("copy.db").stat().st_size
    with sqlite3.connect("copy.db") as copy:
        assert copy.execute("SELECT count(*) FROM store").fetchone() == (1,)
    again = run("db", "backup", "copy.db", *WHERE)
    assert again.exit_code == 2
    assert "exists" in again.stderr
    nothing = run("db", "backup", "other.db", "--data-dir", "nothing")
    assert nothing.exit_code == 2
    assert "no database" in nothing.stderr
    assert not Path("nothing").exists()


def test_down_and_up_again(run: Run, database: Path, models: list[str]) -> None:
    ingested = run("ingest", "-", "-c", "c", "--external-id", "e", *WHERE, *models, input="The lamp is lit.")
    assert ingested.exit_code == 0, ingested.output
    head = answer(run, "db", "current")["head"]
    would = answer(run, "db", "downgrade", "0002", "--dry-run")
    assert (would["before"], would["would_be"]) == (head, "0002")
    assert run("db", "downgrade", "9999", "--dry-run", *WHERE).exit_code == 2
    assert answer(run, "db", "current")["current"] == head
    done = answer(run, "db", "downgrade", "0002", "--yes")
    assert (done["before"], done["now"]) == (head, "0002")
    assert done["bytes_before"] == would["bytes_before"] > 0 < done["bytes_after"]
    assert answer(run, "db", "current", exit_code=1)["current"] == "0002"
    assert run("store", "stats", *WHERE).exit_code == 1, "it is used with an older schema"
    would = answer(run, "db", "upgrade", "--dry-run")
    assert (would["before"], would["would_be"], would["bytes_before"]) == ("0002", head, done["bytes_after"])
    upgraded = answer(run, "db", "upgrade")
    assert (upgraded["before"], upgraded["now"]) == ("0002", head)
    assert upgraded["bytes_before"] == would["bytes_before"] > 0 < upgraded["bytes_after"]
    assert answer(run, "db", "check")["problems"] == []
    assert answer(run, "documents", "show", "e", "-c", "c")["status"] == "ready"
    assert answer(run, "store", "verify")["problems"] == []
    assert {file["collection"] for file in answer(run, "store", "ls")["data"]} == {"c"}
    for revision in ("base", head, "9999", "-1"):
        refused = run("db", "downgrade", "--yes", *WHERE, "--", revision)
        assert refused.exit_code == 2, revision
    assert answer(run, "db", "current")["current"] == head


def test_a_store_in_use_is_not_downgraded(run: Run, database: Path) -> None:
    from memkv.store import Store

    with Store.open(Path("data")):
        refused = run("db", "downgrade", "0001", "--yes", *WHERE)
    assert refused.exit_code == 1
    assert "in use by process" in refused.stderr


def test_a_postgresql_that_is_not_there_is_told_in_plain_words(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setenv("MEMKV_DATABASE_URL", "postgresql://memkv@127.0.0.1:1/memkv")
    for command in (("db", "upgrade"), ("db", "current"), ("db", "check")):
        result = run(*command, *WHERE)
        assert result.exit_code == 1
        assert "PostgreSQL does not answer" in result.stderr
        assert "check that it runs and that MEMKV_DATABASE_URL is right" in result.stderr
        assert "retry" not in result.stderr


class TestDoctor:
    def findings(self, run: Run, *options: str, models: list[str]) -> dict[str, str]:
        result = run("doctor", *options, *WHERE, *models, "--format", "json")
        return {finding["name"]: finding["state"] for finding in json.loads(result.stdout)["findings"]}

    def test_an_older_schema_is_backed_up_and_upgraded(
        self, run: Run, database: Path, models: list[str]
    ) -> None:
        answer(run, "db", "downgrade", "0001", "--yes")
        assert self.findings(run, models=models)["schema"] == "failed"
        assert "schema" not in self.findings(run, "--fix", models=models)
        assert answer(run, "db", "check")["problems"] == []
        with sqlite3.connect("data/before-upgrade-from-0001") as kept:
            assert kept.execute("SELECT version_num FROM alembic_version").fetchone() == ("0001",)

    def test_a_directory_open_to_others_is_closed(self, run: Run, database: Path, models: list[str]) -> None:
        Path("data").chmod(0o755)
        assert self.findings(run, models=models)["modes"] == "warning"
        assert Path("data").stat().st_mode & 0o777 == 0o755, "it mended without being asked"
        assert self.findings(run, "--fix", models=models)["modes"] == "ok"
        assert Path("data").stat().st_mode & 0o777 == 0o700

    def test_a_missing_model_is_installed(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, models: list[str]
    ) -> None:
        from memkv.model import install

        installed: list[str] = []
        monkeypatch.setattr(install, "install", lambda name, root: installed.append(name) or Path("there"))
        monkeypatch.setenv("MEMKV_MODELS_DIR", "nothing-here")
        assert self.findings(run, "--fix", models=[])["model"] == "failed"
        assert installed == ["smollm2-135m-instruct", "all-minilm-l6-v2"]


def test_every_revision_goes_down_and_up() -> None:
    assert schema._older_than("0004") == ["0003", "0002", "0001"]
    assert schema._older_than("0001") == []
