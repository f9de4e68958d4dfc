"""Documents in, answers out: embedded, and through a server; the same commands, the same shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from memkv.config import load_config
from memkv.memory.stored import StoredMemory
from memkv.store.rows import NewDocument

LIGHT = (
    "# The light\n\nThe lamp of the tower is lit half an hour before sunset. It shows two white flashes.\n"
)
BOAT = "# The boat\n\nThe supply boat comes every second Tuesday. Her skipper is Tomas Hale.\n"


@pytest.fixture(params=["embedded", "server"])
def where(request: pytest.FixtureRequest, models: list[str]) -> list[str]:
    """The options that say where to work."""
    if request.param == "server":
        return ["--url", request.getfixturevalue("server")]
    return ["--data-dir", "data", *models]


@pytest.fixture
def documents() -> Path:
    folder = Path("handbook")
    (folder / "deep").mkdir(parents=True)
    (folder / "light.md").write_text(LIGHT)
    (folder / "deep" / "boat.txt").write_text(BOAT)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A collection of the test's own: the server outlives it."""
    return "c-" + "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].strip("-")


def answer(run: Run, *arguments: str) -> Any:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_whole_way(run: Run, where: list[str], documents: Path, name: str) -> None:
    first = answer(run, "ingest", str(documents), "-c", name, "--meta", "kind=book", *where)
    assert {row["external_id"]: row["outcome"] for row in first} == {
        "handbook/deep/boat.txt": "created",
        "handbook/light.md": "created",
    }
    again = answer(run, "ingest", str(documents), "-c", name, "--meta", "kind=book", *where)
    assert [row["outcome"] for row in again] == ["unchanged", "unchanged"]

    found = answer(run, "search", "When does the boat come?", "-c", name, "-k", "1", *where)
    assert [chunk["external_id"] for chunk in found["data"]] == ["handbook/deep/boat.txt"]
    none = answer(run, "search", "boat", "-c", name, "--filter", "kind=letter", *where)
    assert none["data"] == []

    response = answer(run, "query", "When does the boat come?", "-c", name, "--max-tokens", "4", *where)
    assert response["usage"]["completion_tokens"] <= 4
    assert response["usage"]["prefilled_tokens"] < response["usage"]["prompt_tokens"]
    assert {chunk["external_id"] for chunk in response["chunks"]} == {row["external_id"] for row in first}

    listed = answer(run, "documents", "list", "-c", name, *where)["data"]
    assert {document["status"] for document in listed} == {"ready"}
    shown = answer(run, "documents", "show", "handbook/light.md", "-c", name, *where)
    assert shown["title"] == "The light"
    assert shown["metadata"] == {"kind": "book"}
    assert run("documents", "delete", "handbook/light.md", "-c", name, "--yes", *where).exit_code == 0
    assert len(answer(run, "documents", "list", "-c", name, *where)["data"]) == 1

    collection = answer(run, "collections", "show", name, *where)
    assert collection["counts"]["documents"] == 1
    assert name in [
        entry["name"] for entry in answer(run, "collections", "list", "--limit", "100", *where)["data"]
    ]
    jobs = answer(run, "jobs", "list", "-c", name, *where)["data"]
    assert {job["status"] for job in jobs} == {"succeeded"}
    assert answer(run, "jobs", "list", "-c", name, "--kind", "gc", *where)["data"] == []
    watched = answer(run, "jobs", "watch", jobs[0]["id"], *where)
    assert watched == answer(run, "jobs", "show", jobs[0]["id"], *where)
    for verb in ("cancel", "retry"):
        refused = run("jobs", verb, jobs[0]["id"], *where)
        assert refused.exit_code == 1
        assert {"cancel": "has ended already", "retry": "nothing of the job is left"}[verb] in refused.stderr
    assert answer(run, "store", "stats", *where)["kv_files"] > 0
    assert run("collections", "delete", name, "--yes", *where).exit_code == 0
    assert run("collections", "show", name, *where).exit_code == 1


def test_what_a_person_reads(run: Run, where: list[str], documents: Path, name: str) -> None:
    result = run("ingest", str(documents), "-c", name, *where)
    assert "created  handbook/light.md" in result.stdout
    assert "2 created" in result.stderr
    listed = run("documents", "list", "-c", name, *where).stdout.splitlines()
    assert listed[0].split()[:2] == ["external", "id"]
    assert any("handbook/light.md" in line and "ready" in line for line in listed)
    plain = run("query", "When is the lamp lit?", "-c", name, "--max-tokens", "4", *where)
    streamed = run("query", "When is the lamp lit?", "-c", name, "--max-tokens", "4", "--stream", *where)
    for result in (plain, streamed):
        assert result.exit_code == 0, result.output
        line = result.stdout.splitlines()[-1]
        for word in ("prompt tokens", "cached", "prefilled", "policy exact", "first token"):
            assert word in line
    assert streamed.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    quiet = run("query", "When is the lamp lit?", "-c", name, "--max-tokens", "4", "-q", *where)
    assert quiet.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    assert "prompt tokens" not in quiet.output
    assert quiet.stderr == ""


def test_standard_input_with_a_name(run: Run, where: list[str], name: str) -> None:
    result = run("ingest", "-", "-c", name, "--external-id", "note", *where, input=BOAT)
    assert result.exit_code == 0, result.output
    assert "created  note" in result.stdout


def test_a_part_that_fails_is_told_and_the_rest_is_kept(
    run: Run, where: list[str], documents: Path, name: str
) -> None:
    (documents / "empty.txt").write_text("")
    result = run("ingest", str(documents), "missing.txt", "-c", name, "--format", "json", *where)
    assert result.exit_code == 3, result.output
    outcome = {row["external_id"]: row["outcome"] for row in json.loads(result.stdout)}
    assert outcome["handbook/light.md"] == outcome["handbook/deep/boat.txt"] == "created"
    assert outcome["handbook/empty.txt"] == outcome["missing.txt"] == "failed"
    assert result.stderr.count("error: ") == 2


def test_not_waiting_leaves_a_job(run: Run, server: str, documents: Path, name: str) -> None:
    url = ["--url", server]
    rows = answer(run, "ingest", str(documents / "light.md"), "-c", name, "--no-wait", *url)
    assert rows[0]["outcome"] in ("queued", "created")
    job = answer(run, "jobs", "list", "-c", name, *url)["data"][0]["id"]
    assert answer(run, "jobs", "watch", job, "--timeout", "60", *url)["status"] == "succeeded"


def test_settings_of_a_collection(run: Run, where: list[str], name: str) -> None:
    create = ("collections", "create", name, "--chunk-tokens", "64", "--block-size", "8", *where)
    made = answer(run, *create)
    assert (made["chunk_tokens"], made["block_size"], made["prefill"]) == (64, 8, "eager")
    assert run(*create).exit_code == 1
    assert run(*create, "--exist-ok").exit_code == 0
    assert "created" in run("ingest", "-", "-c", name, *where, input=BOAT).stdout


def test_terminal_commands_in_documents_are_not_obeyed(run: Run, models: list[str]) -> None:
    Path("evil.txt").write_text("The lamp \x1b[2Jis \x07red.\n")
    where = ["--data-dir", "data", *models]
    run("ingest", "evil.txt", "-c", "evil", *where)
    shown = run("search", "lamp", "-c", "evil", *where).stdout
    assert "red" in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


def test_the_store_is_verified_and_damage_is_told(run: Run, models: list[str], documents: Path) -> None:
    run("ingest", str(documents), "-c", "books", "--data-dir", "data", *models)
    sound = answer(run, "store", "verify", "--data-dir", "data")
    assert sound["problems"] == []
    assert sound["kv_files"] > 0
    block_file = next(path for path in Path("data/blocks").rglob("*") if path.is_file())
    block_file.chmod(0o600)
    data = bytearray(block_file.read_bytes())
    data[-1] ^= 1
    block_file.write_bytes(data)
    block_file.chmod(0o400)
    broken = run("store", "verify", "--data-dir", "data", "--format", "json")
    assert broken.exit_code == 1
    assert len(json.loads(broken.stdout)["problems"]) == 1
    assert run("store", "verify", "--repair", "--data-dir", "data").exit_code == 0
    assert answer(run, "store", "verify", "--data-dir", "data")["problems"] == []


def test_models_are_listed_and_installed(run: Run, smollm2: Path, minilm: Path) -> None:
    listed = answer(run, "models", "list")
    assert {entry["name"]: entry["path"] for entry in listed}.items() >= {
        "smollm2-135m-instruct": str(smollm2),
        "all-minilm-l6-v2": str(minilm),
    }.items()
    assert answer(run, "models", "install", "all-minilm-l6-v2") == {"all-minilm-l6-v2": str(minilm)}


def test_the_schema_is_told_and_made(run: Run) -> None:
    assert answer(run, "db", "current", "--data-dir", "data") is None
    made = answer(run, "db", "upgrade", "--data-dir", "data")
    assert made["before"] is None
    assert answer(run, "db", "current", "--data-dir", "data")["current"] == made["now"]
    assert answer(run, "db", "upgrade", "--data-dir", "data")["before"] == made["now"]


def test_the_demo_answers_and_compares(run: Run, models: list[str]) -> None:
    """The tiny model's words are noise; its counts are not."""
    rows = answer(run, "demo", *models)
    assert {row["way"] for row in rows} == {"off", "exact", "head:1", "map"}
    for question in {row["question"] for row in rows}:
        prefilled = {row["way"]: row["prefilled_tokens"] for row in rows if row["question"] == question}
        assert prefilled["off"] > prefilled["exact"] > prefilled["head:1"] > prefilled["map"] > 0
    shown = run("demo", *models)
    assert shown.exit_code == 0
    assert "12 documents" in shown.stderr
    assert shown.stdout.count("prefilled tokens") == 3


def test_a_job_is_cancelled_and_tried_again(run: Run, models: list[str]) -> None:
    """Embedded: a job that nobody works on, since `--no-wait` ends with the process that would."""
    where = ["--data-dir", "data"]
    run("collections", "create", "c", *where, *models)
    with StoredMemory.open_store(load_config({"store.data_dir": "data"}, env={})) as memory:
        row = memory._store.catalog.get_collection("default", "c")
        accepted = memory._store.accept_documents("default", row.id, [NewDocument("A text.", "a")])
    assert accepted.job is not None
    job = accepted.job.id
    cancelled = answer(run, "jobs", "cancel", job, *where)
    assert (cancelled["status"], cancelled["errors"][0]["code"]) == ("cancelled", "cancelled")
    assert run("jobs", "cancel", job, *where).exit_code == 1
    assert answer(run, "documents", "show", "a", "-c", "c", *where)["status"] == "failed"
    assert answer(run, "jobs", "retry", job, "--no-wait", *where)["status"] == "queued"
    assert "queued" in run("jobs", "show", job, *where).stdout
    assert answer(run, "jobs", "watch", job, *where, *models)["status"] == "succeeded"
    assert answer(run, "documents", "show", "a", "-c", "c", *where)["status"] == "ready"
