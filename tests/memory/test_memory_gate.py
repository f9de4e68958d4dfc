"""Which policy `auto` takes: what was measured decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from memkv.config import QueryConfig
from memkv.engine.reuse import Exact
from memkv.errors import BadRequestError, ConflictError
from memkv.memory.gate import ChosenPolicy, cheapest_that_passed, named_policy
from memkv.store import Store
from memkv.store.rows import GateRow
from memkv.wire import CollectionCreate, DocumentCreate, QueryRequest

CONFIG = QueryConfig()


def gate(policy: str, dnll_high: float, **changes: object) -> GateRow:
    row = GateRow("tasks", 256, 4096, "real", policy, questions=150, fresh=0.2, dnll_high=dnll_high)
    return replace(row, **changes)  # type: ignore[arg-type]


def chosen_of(rows: list[GateRow], config: QueryConfig = CONFIG, **prompt: int) -> ChosenPolicy:
    return cheapest_that_passed(rows, config, **{"chunk_tokens": 256, **prompt})


def test_nothing_measured_means_exact_and_says_so() -> None:
    chosen = chosen_of([])
    assert isinstance(chosen.policy, Exact)
    assert "measured" in chosen.fallback_reason


def test_the_cheapest_that_passes_is_taken() -> None:
    rows = [
        gate("map", 0.5, fresh=0.0),
        gate("select:0.3", 0.09, fresh=0.3),
        gate("mass:0.8", 0.1, fresh=0.13),
    ]
    chosen = chosen_of(rows)
    assert (chosen.policy.name, chosen.fallback_reason) == ("mass:0.8", "")


def test_a_policy_passes_only_on_every_kind() -> None:
    rows = [gate("map", 0.05), gate("map", 0.2, kind="needle")]
    chosen = chosen_of(rows)
    assert isinstance(chosen.policy, Exact)
    assert "0.1 nats" in chosen.fallback_reason


def test_tasks_that_the_model_cannot_do_are_left_out() -> None:
    rows = [gate("map", 0.05), gate("map", 0.9, kind="riddles", accuracy_full=0.4)]
    assert chosen_of(rows).policy.name == "map"
    assert isinstance(chosen_of(rows[1:]).policy, Exact)


def test_few_questions_prove_nothing_and_it_is_said() -> None:
    chosen = chosen_of([gate("map", 0.0, questions=99)])
    assert isinstance(chosen.policy, Exact)
    assert "100 questions" in chosen.fallback_reason
    worse = chosen_of([gate("map", 0.5, questions=9)])
    assert "questions" not in worse.fallback_reason


def test_a_peer_that_passed_is_not_served() -> None:
    rows = [gate("cacheblend:0.3", 0.01, fresh=0.1), gate("head:2", 0.05, fresh=0.2)]
    assert chosen_of(rows).policy.name == "head:2"


def test_that_exact_passes_is_no_news() -> None:
    rows = [gate("map", 0.5), *(gate(name, 0.0, fresh=0.9, questions=9) for name in ("exact", "order"))]
    chosen = chosen_of(rows)
    assert isinstance(chosen.policy, Exact)
    assert chosen.fallback_reason.endswith("0.1 nats a token, so auto means exact")


def test_the_margin_is_configured() -> None:
    rows = [gate("map", 0.3)]
    assert chosen_of(rows, replace(CONFIG, gate_dnll=0.3)).policy.name == "map"


def test_a_policy_passes_only_where_it_was_measured_on_all_that_was() -> None:
    rows = [gate("map", 0.05), gate("select:0.3", 0.05), gate("select:0.3", 0.09, kind="needle")]
    assert chosen_of(rows).policy.name == "select:0.3"
    elsewhere = [gate("map", 0.05), gate("select:0.3", 0.05), gate("select:0.3", 0.05, data="other")]
    assert chosen_of(elsewhere).policy.name == "select:0.3"


def test_what_was_measured_of_larger_chunks_or_fewer_says_nothing() -> None:
    rows = [gate("map", 0.05)]
    assert chosen_of(rows, chunk_tokens=512).policy.name == "map"
    smaller = chosen_of(rows, chunk_tokens=128)
    assert isinstance(smaller.policy, Exact)
    assert "larger chunks" in smaller.fallback_reason
    assert chosen_of(rows, mapped_tokens=4096).policy.name == "map"
    more = chosen_of(rows, mapped_tokens=4097)
    assert isinstance(more.policy, Exact)
    assert "fewer" in more.fallback_reason


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(BadRequestError, match="unknown reuse policy"):
        named_policy("zz")
    assert named_policy("auto") is None


def test_auto_takes_what_passed_for_this_model_and_no_other(open_memory, tmp_path: Path) -> None:
    memory = open_memory()
    memory.create_collection(CollectionCreate(name="c"))
    text = "\n\n".join(f"Paragraph {n} speaks of the lamp, the tower and {n} ships." for n in range(60))
    memory.ingest("c", [DocumentCreate(text=text, external_id="doc")], wait=120)
    question = QueryRequest(query="How many ships?", collection="c", min_score=-1.0)
    first = memory.query(question).reuse
    assert first.policy == memory.info().default_policy == "exact"
    assert "measured" in first.fallback_reason
    memory.close()

    with Store.open(tmp_path / "data") as store:
        row = store.catalog.get_collection("default", "c")
        store.catalog.put_gates("another fingerprint", [gate("map", 0.01)])
    memory = open_memory()
    assert memory.query(question).reuse.policy == "exact"
    memory.close()

    with Store.open(tmp_path / "data") as store:
        cheap = gate("map", 0.01, fresh=0.0)
        store.catalog.put_gates(row.fingerprint_digest, [cheap, gate("head:1", 0.01)])
    memory = open_memory()
    served = memory.query(question).reuse
    assert (served.policy, served.fallback_reason) == ("map", "")
    assert memory.info().default_policy == "map"
    assert memory.query(QueryRequest(query="Ships?", collection="c", policy="exact")).reuse.policy == "exact"
    memory.close()

    memory = open_memory(kv__dtype="float32")  # another fingerprint: its gate is not known
    memory.create_collection(CollectionCreate(name="d"))
    memory.ingest("d", [DocumentCreate(text=text, external_id="doc")], wait=120)
    other = QueryRequest(query="How many ships?", collection="d", min_score=-1.0)
    assert memory.query(other).reuse.policy == "exact"


def test_a_primer_is_part_of_the_prefix_and_of_what_the_gate_goes_by(open_memory, tmp_path: Path) -> None:
    memory = open_memory()
    plain = memory.create_collection(CollectionCreate(name="plain"))
    primed = memory.create_collection(CollectionCreate(name="primed", primer=True))
    assert (plain.primer, primed.primer) == (False, True)
    assert primed.prefix_tokens > plain.prefix_tokens
    assert primed.fingerprint != plain.fingerprint
    with pytest.raises(ConflictError, match="primer"):
        memory.create_collection(CollectionCreate(name="primed"), exist_ok=True)
    text = "\n\n".join(f"Paragraph {n} speaks of the lamp, the tower and {n} ships." for n in range(30))
    for name in ("plain", "primed"):
        memory.ingest(name, [DocumentCreate(text=text, external_id="doc")], wait=120)
    memory.close()

    with Store.open(tmp_path / "data") as store:
        store.catalog.put_gates(primed.fingerprint, [gate("map", 0.01)])
    memory = open_memory()
    for name, policy in (("plain", "exact"), ("primed", "map")):
        asked = QueryRequest(query="How many ships?", collection=name, min_score=-1.0)
        answer = memory.query(asked)
        assert answer.reuse.policy == policy
        assert answer.usage.cached_tokens >= (primed if name == "primed" else plain).prefix_tokens
    asked = QueryRequest(query="How many ships?", collection="primed", min_score=-1.0, policy="exact")
    assert memory.query(asked).answer == memory.query(msgspec.structs.replace(asked, reuse="off")).answer
