"""Keeping a store from the command line: embedded without any model, and the same through a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from memkv.memory import parts

TEXT = "# The light\n\nThe lamp of the tower is lit half an hour before sunset. It shows two flashes.\n"


@pytest.fixture(params=["embedded", "server"])
def where(request: pytest.FixtureRequest, models: list[str]) -> list[str]:
    if request.param == "server":
        return ["--url", request.getfixturevalue("server")]
    return ["--data-dir", "data", *models]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return "s-" + "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].strip("-")


@pytest.fixture
def filled(run: Run, where: list[str], name: str) -> list[str]:
    """A collection with one document; the options that lead there."""
    result = run("ingest", "-", "-c", name, "--external-id", "light", *where, input=TEXT + name)
    assert result.exit_code == 0, result.output
    return where


def answer(run: Run, *arguments: str, exit_code: int = 0) -> Any:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_files_are_listed_shown_evicted_and_made_again(run: Run, filled: list[str], name: str) -> None:
    where = filled
    listed = answer(run, "store", "ls", "-c", name, "--limit", "100", *where)["data"]
    assert {file["collection"] for file in listed} == {name}
    chunk = next(file for file in listed if file["uses"] == 0 and file["chunks"] == 1)
    shown = answer(run, "store", "show", chunk["key"][:16], *where)
    assert shown["file"] == chunk
    assert shown["damage"] is None
    assert "as written" in run("store", "show", chunk["key"], *where).stdout

    plan = answer(run, "store", "evict", "-c", name, "--all", "--dry-run", *where)
    assert plan["dry_run"]
    assert plan["files"] > 0
    done = answer(run, "store", "evict", "-c", name, "--all", *where)
    assert done["files"] == plan["files"]
    assert done["bytes_after"] < done["bytes_before"]
    work = answer(run, "store", "reprefill", name, "--dry-run", *where)
    assert (work["files"], work["job"]) == (plan["files"], None)
    assert work["bytes_before"] == done["bytes_after"] < work["bytes_after"]
    made = run("store", "reprefill", name, *where)
    assert made.exit_code == 0, made.output
    lines = [line.split(maxsplit=1) for line in made.stdout.splitlines()]
    assert [line[0] for line in lines] == ["made", "before", "after"]
    assert lines[0][1].startswith(f"{plan['files']} block file")
    assert lines[1][1] != lines[2][1]
    assert len(answer(run, "store", "ls", "-c", name, "--limit", "100", *where)["data"]) == len(listed)
    warmed = answer(run, "store", "warm", name, *where)
    assert warmed["files"] in (len(listed), len(listed) + 1), "the prefix may be another's"
    assert warmed["job"]["status"] == "succeeded"


def test_the_store_is_checked_and_swept(run: Run, filled: list[str]) -> None:
    found = answer(run, "store", "verify", *filled)
    assert (found["found"], found["problems"]) == (0, [])
    assert answer(run, "store", "verify", "--quick", *filled)["full"] is False
    assert "no problems" in run("store", "verify", "--deep", "1", *filled).stdout
    bounded = answer(run, "store", "verify", "--max-duration", "0.000001", *filled)
    assert (bounded["files"], bounded["files_left"]) == (1, found["kv_files"] - 1)
    told = run("store", "verify", "--max-duration", "0.000001", *filled)
    assert f"left for want of time: {found['kv_files'] - 1} block file" in told.stdout
    assert "left for want of time" not in run("store", "verify", "--max-duration", "600", *filled).stdout
    repaired = run("store", "verify", "--repair", *filled)
    assert "before " in repaired.stdout
    assert ", after " in repaired.stdout
    plan = answer(run, "store", "verify", "--dry-run", *filled)
    assert plan["files"] == found["kv_files"]
    for command in ("gc", "compact"):
        dry = answer(run, "store", command, "--dry-run", *filled)
        done = answer(run, "store", command, *filled)
        assert (dry["dry_run"], done["dry_run"], done["failed"]) == (True, False, 0)
        assert done["bytes_after"] <= done["bytes_before"]
    assert answer(run, "store", "quarantine", *filled) == {"files": [], "bytes": 0}
    assert answer(run, "store", "quarantine", "--purge", *filled)["files"] == 0


def test_what_no_model_was_opened_for_is_not_said_to_be_sound(run: Run, where: list[str]) -> None:
    """A server knows which collections another model made; a command that opens no model does not."""
    stale = answer(run, "store", "stats", *where)["stale"]
    told = run("store", "stats", *where).stdout
    if where[0] == "--url":
        assert stale == []
        assert "stale" not in told
    else:
        assert stale is None
        assert "not told without a model: memkv doctor" in told


def test_what_was_set_aside_is_told(run: Run, models: list[str]) -> None:
    where = ["--data-dir", "data"]
    run("ingest", "-", "-c", "c", *where, *models, input=TEXT)
    [block_file, *_] = sorted(Path("data/blocks").glob("*/*.kv"))
    block_file.chmod(0o600)
    block_file.write_bytes(block_file.read_bytes()[:-1])
    block_file.chmod(0o400)
    shown = run("store", "show", block_file.name[:64], *where)
    assert shown.exit_code == 1
    assert "size: " in shown.stdout
    assert run("store", "verify", "--quick", *where).exit_code == 1
    assert run("store", "verify", "--repair", *where).exit_code == 0
    listed = run("store", "quarantine", *where)
    assert block_file.name in listed.stdout
    assert "size" in listed.stdout
    assert answer(run, "store", "quarantine", "--purge", "--dry-run", *where)["files"] == 1
    assert answer(run, "store", "quarantine", "--purge", *where)["files"] == 1
    assert answer(run, "store", "quarantine", *where)["files"] == []


def test_most_of_a_store_goes_only_by_force(run: Run, models: list[str]) -> None:
    where = ["--data-dir", "data"]
    run("db", "upgrade", *where)
    for number in range(20):
        key = f"{number:064x}"
        place = Path("data/blocks") / key[:2]
        place.mkdir(exist_ok=True)
        (place / f"{key}.{'0' * 32}.kv").write_bytes(b"x")
    refused = run("store", "gc", *where)
    assert refused.exit_code == 1
    assert "--force" in refused.stderr
    assert answer(run, "store", "gc", "--force", *where)["files"] == 20


@pytest.mark.parametrize(
    "command",
    [
        ("store", "evict"),
        ("store", "evict", "--all", "--to", "1GB"),
        ("store", "evict", "--to", "much"),
        ("store", "show", "short"),
        ("store", "verify", "--deep", "1001"),
        ("store", "verify", "--max-duration", "0"),
        ("store", "verify", "--quick", "--max-duration", "5"),
    ],
)
def test_wrong_usage_is_told(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, "--data-dir", "data")
    assert result.exit_code == 2, result.output


def test_what_needs_no_model_loads_none(run: Run, models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    where = ["--data-dir", "data"]
    run("ingest", "-", "-c", "c", "--external-id", "e", *where, *models, input=TEXT)

    def refuse(*_: object) -> object:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(parts, "load_language_model", refuse)
    monkeypatch.setattr(parts, "load_embedder", refuse)
    job = answer(run, "jobs", "list", *where)["data"][0]["id"]
    for command in (
        ("collections", "list"),
        ("collections", "show", "c"),
        ("documents", "list", "-c", "c"),
        ("documents", "show", "e", "-c", "c"),
        ("jobs", "show", job),
        ("store", "stats"),
        ("store", "ls"),
        ("store", "verify"),
        ("store", "gc"),
        ("store", "warm", "c"),
        ("store", "evict", "--all"),
        ("store", "compact"),
        ("store", "quarantine"),
        ("documents", "delete", "e", "-c", "c", "--yes"),
        ("collections", "delete", "c", "--yes"),
    ):
        result = run(*command, *where)
        assert result.exit_code == 0, f"{command}: {result.output}"
    control = run("search", "lamp", "-c", "c", *where)
    assert "a model was loaded" in control.stderr


def test_a_job_that_nobody_works_on_is_told(run: Run, models: list[str]) -> None:
    where = ["--data-dir", "data", *models]
    result = run("ingest", "-", "-c", "c", "--no-wait", *where, input=TEXT)
    assert result.exit_code == 0
    if "queued" in result.stdout:
        assert "nothing works on it now" in result.stderr
    quiet = run("ingest", "-", "-c", "c", "--external-id", "b", "--no-wait", "-q", *where, input=TEXT)
    assert quiet.stderr == ""


def test_what_an_ingest_would_cost_is_told_and_nothing_kept(run: Run, where: list[str], name: str) -> None:
    Path("light.md").write_text(TEXT + name)
    cost = answer(run, "ingest", "light.md", "-c", name, "--dry-run", *where)
    assert (cost["documents"], cost["fits"]) == (1, True)
    assert cost["kv_bytes"] > 0
    assert run("collections", "show", name, *where).exit_code == 1, "the collection was made"
    told = run("ingest", "light.md", "-c", name, "--dry-run", *where)
    assert "it fits" in told.stdout
    assert "worth keeping  " in told.stdout
    made = answer(run, "collections", "create", name, "--max-kv", "1kB", "--prefill", "eager", *where)
    assert made["max_kv_bytes"] == 1000
    refused = run("ingest", "light.md", "-c", name, "--dry-run", *where)
    assert refused.exit_code == 1
    assert "does not fit" in refused.stdout
    full = run("ingest", "light.md", "-c", name, *where)
    assert full.exit_code == 1
    assert "of at most 1,000" in full.stderr
    changed = answer(run, "collections", "update", name, "--max-kv", "0", "--prefill", "after_5_uses", *where)
    assert (changed["max_kv_bytes"], changed["prefill"]) == (0, "after_5_uses")
    assert run("ingest", "light.md", "-c", name, *where).exit_code == 0
    assert answer(run, "store", "ls", "-c", name, *where)["data"] == [], "it was not used five times yet"
    assert run("collections", "update", name, "--prefill", "lazily", *where).exit_code == 2


def test_copies_are_made_and_brought_back(run: Run, models: list[str]) -> None:
    where = ["--data-dir", "data"]
    run("ingest", "-", "-c", "c", "--external-id", "kept", *where, *models, input=TEXT)
    planned = answer(run, "store", "snapshot", "create", "--dry-run", *where)
    assert answer(run, "store", "snapshot", "list", *where)["data"] == []
    made = answer(run, "store", "snapshot", "create", *where)
    changing = ("id", "time", "generation", "database_bytes", "database_digest")
    assert {**planned, **{key: made[key] for key in changing}} == made
    would = answer(run, "store", "export", "all.tar", "--kv", "--dry-run", *where)
    assert not Path("all.tar").exists()
    exported = answer(run, "store", "export", "all.tar", "--kv", *where)
    assert {**would, "bytes": exported["bytes"], "dry_run": False} == exported
    assert 0 < would["bytes"] < exported["bytes"] < would["bytes"] + 100_000
    assert (exported["documents"], exported["collections"]) == (1, ["c"])
    assert exported["kv_files"] > exported["vectors"] > 0, "the prefix has KV and no vector"
    again = run("store", "export", "all.tar", *where)
    assert again.exit_code == 2
    assert "exists" in again.stderr
    run("documents", "delete", "kept", "-c", "c", "--yes", *where)
    assert [s["id"] for s in answer(run, "store", "snapshot", "list", *where)["data"]] == [made["id"]]
    assert "would restore" in run("store", "snapshot", "restore", made["id"], "--dry-run", *where).stdout
    assert run("documents", "show", "kept", "-c", "c", *where).exit_code == 1
    assert run("store", "snapshot", "restore", made["id"], "--yes", *where).exit_code == 0
    assert answer(run, "documents", "show", "kept", "-c", "c", *where)["status"] == "ready"
    assert "would delete" in run("store", "snapshot", "delete", made["id"], "--dry-run", *where).stdout
    assert run("store", "snapshot", "delete", made["id"], *where).exit_code == 0
    assert run("store", "snapshot", "delete", made["id"], "--dry-run", *where).exit_code == 1
    assert run("store", "snapshot", "restore", made["id"], "--yes", *where).exit_code == 1

    there = ["--data-dir", "there", *models]
    plan = answer(run, "store", "import", "all.tar", "--dry-run", *there)
    assert (plan["documents"], plan["dry_run"], plan["bytes_after"]) == (1, True, plan["bytes_before"])
    came = run("store", "import", "all.tar", "--kv", *there)
    assert came.exit_code == 0, came.output
    told = [" ".join(line.split()) for line in came.stdout.splitlines()]
    assert f"vectors taken {exported['vectors']}" in told
    assert any(line.startswith(f"kv taken {exported['kv_files']} block file") for line in told)
    assert "before 0 B" in told
    assert any(line.startswith("after ") and line != "after 0 B" for line in told)
    assert answer(run, "documents", "show", "kept", "-c", "c", "--data-dir", "there")["status"] == "ready"
    Path("noise.tar").write_bytes(b"noise" * 1000)
    refused = run("store", "import", "noise.tar", *there)
    assert refused.exit_code == 2
    assert "the archive is refused" in refused.stderr


def test_a_server_writes_and_reads_archives_by_name(run: Run, server: str, name: str) -> None:
    """In `archives/` of its own data directory, and nowhere else."""
    where = ["--url", server]
    run("ingest", "-", "-c", name, "--external-id", "light", *where, input=TEXT + name)
    archive = f"{name}.tar"
    would = answer(run, "store", "export", archive, "-c", name, "--dry-run", *where)
    assert (would["documents"], would["dry_run"]) == (1, True)
    done = answer(run, "store", "export", archive, "-c", name, *where)
    assert done["path"].endswith(f"/archives/{archive}")
    assert done["documents"] == 1
    assert not Path(archive).exists(), "it was written here"
    again = run("store", "export", archive, "-c", name, *where)
    assert again.exit_code == 1
    assert "exists" in again.stderr
    elsewhere = run("store", "export", f"./{name}-x.tar", "-c", name, *where)
    assert elsewhere.exit_code == 0, "a path is brought into its plain form first"
    assert run("store", "export", f"../{archive}", "-c", name, *where).exit_code == 2
    run("collections", "delete", name, "--yes", *where)
    assert answer(run, "store", "import", archive, "--dry-run", *where)["documents"] == 1
    told = run("store", "import", archive, *where)
    assert told.exit_code == 0, told.output
    assert "imported " in told.stdout
    assert answer(run, "documents", "show", "light", "-c", name, *where)["status"] == "ready"


def test_a_server_is_brought_back_to_a_snapshot(run: Run, server: str, name: str) -> None:
    where = ["--url", server]
    run("ingest", "-", "-c", name, "--external-id", "before", *where, input=TEXT + name)
    made = answer(run, "store", "snapshot", "create", *where)["id"]
    run("ingest", "-", "-c", name, "--external-id", "after", *where, input=f"{TEXT}{name} after")
    assert "would restore" in run("store", "snapshot", "restore", made, "--dry-run", *where).stdout
    assert answer(run, "documents", "show", "after", "-c", name, *where)["status"] == "ready"
    restored = run("store", "snapshot", "restore", made, "--yes", *where)
    assert restored.exit_code == 0, restored.output
    assert made in restored.stdout
    assert run("documents", "show", "after", "-c", name, *where).exit_code == 1
    assert answer(run, "documents", "show", "before", "-c", name, *where)["status"] == "ready"
    unknown = run("store", "snapshot", "restore", f"snp_{'0' * 32}", "--yes", *where)
    assert unknown.exit_code == 1
    assert "memkv store snapshot list" in unknown.stderr
