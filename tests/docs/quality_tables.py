"""What the kept evaluations say, as the tables of README.md and of the results' own page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memkv.config import QueryConfig
from memkv.eval.study import Row, Study, read_study
from memkv.memory.gate import cheapest_that_passed

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results" / "quality"
SHOWN = {  # in README.md; "" where the policy's own name says it
    "full": "full prefill",
    "exact": "",
    "map": "",
    "head:1": "`head:1` (EPIC, 16 tokens)",
    "head:2": "`head:2` (EPIC, 32 tokens)",
    "select:0.05": "",
    "select:0.1": "",
    "select:0.15": "",
    "select:0.2": "",
    "select:0.3": "",
    "mass:0.95": "",
    "cacheblend:0.15": "CacheBlend, 15 % of tokens",
    "cacheblend:0.3": "CacheBlend, 30 % of tokens",
}


def real_questions() -> str:
    """Every policy on MTRAG, cheapest first, without and with a primer."""
    study, primed = _study("mtrag"), _study("mtrag-prompt")
    with_primer = {row.policy: row for row in primed.rows}
    full, full_primed = _row(study, "full"), _row(primed, "full")
    lines = [
        f"{full.questions} MTRAG questions among {study.chunk_tokens_mean:.0f} retrieved tokens in chunks of "
        f"up to {study.form['chunk_tokens']}; {study.dtype} (products in TF32 "
        f"on the GPU), KV in {study.kv_dtype}; {study.device}. Added "
        "is what a policy adds to the gold answer's negative log-likelihood under a full prefill of the same "
        "prompt, in nats a token, with its 95 % interval; that likelihood itself is "
        f"{full.nll_full:.2f} without and {full_primed.nll_full:.2f} with the primer.",
        "",
        "| policy | computed | added | | first token | sooner | with a primer: added | | sooner |",
        "| --- | --: | --: | --- | --: | --: | --: | --- | --: |",
    ]
    for row in sorted(study.rows, key=lambda row: row.fresh):
        if row.policy in SHOWN:
            other = with_primer.get(row.policy)
            lines.append(
                f"| {SHOWN[row.policy] or f'`{row.policy}`'} | {100 * row.fresh:.0f} % | {_added(row)} | "
                f"{_time(row)} | {_sooner(row)} | {_added(other)} | {_sooner(other)} |"
            )
    return "\n".join([*lines, ""])


def needles() -> str:
    """Made-up tasks that the model can do, and what the gate makes of all."""
    study, primed = _study("generated"), _study("generated-prompt")
    rows = [row for row in study.rows if row.kind == "needle" and row.policy in SHOWN]
    others = ", ".join(
        f"{row.kind.replace('_', ' ')} {100 * row.accuracy_full:.0f} %"
        for row in study.rows
        if row.policy == "full" and row.kind != "needle"
    )
    lines = [
        f"{rows[0].questions} made-up questions for one fact among as many tokens, of which a full prefill "
        f"answers {100 * rows[0].accuracy_full:.0f} % right. What it seldom answers right says nothing and "
        f"is left out by the gate: {others}.",
        "",
        "| policy | right | added | | with a primer: right | added | |",
        "| --- | --: | --: | --- | --: | --: | --- |",
    ]
    with_primer = {row.policy: row for row in primed.rows if row.kind == "needle"}
    for row in sorted(rows, key=lambda row: row.fresh):
        other = with_primer.get(row.policy)
        right = "" if other is None else f"{100 * other.accuracy:.0f} %"
        name = SHOWN[row.policy] or f"`{row.policy}`"
        lines.append(f"| {name} | {100 * row.accuracy:.0f} % | {_added(row)} | {right} | {_added(other)} |")
    return "\n".join([*lines, ""])


def gated() -> str:
    """What `auto` means by these results."""
    without, primed = _auto("mtrag", "generated"), _auto("mtrag-prompt", "generated-prompt")
    times, times_primed = _row(_study("mtrag"), without), _row(_study("mtrag-prompt"), primed)
    return (
        f"By these results `auto` means `{without}` for SmolLM2-135M, {times.ttft_speedup:.1f} times sooner "
        f"than a full prefill of 4,000 retrieved tokens, and `{primed}` in a collection with a primer, "
        f"{times_primed.ttft_speedup:.1f} times sooner.\n"
    )


def options() -> str:
    """One thing different at a time."""
    found = msgspec.json.decode((RESULTS / "options" / "smollm2.json").read_bytes(), type=dict[str, Study])
    names = ("map", "head:1", "select:0.1", "select:0.2", "select:0.3")
    lines = [
        "| option | full prefill | " + " | ".join(f"`{name}`" for name in names) + " |",
        "| --- " + "| --: " * (len(names) + 1) + "|",
    ]
    looks = [
        "| looks, at `select:0.15` | added | | with a stored primer | |",
        "| --- | --: | --- | --: | --- |",
    ]
    for name, study in sorted(found.items()):
        if name.startswith("looks"):
            continue
        rows = {row.policy: row for row in study.rows}
        cells = " | ".join(f"{_signed(rows[policy].dnll)}" for policy in names)
        lines.append(f"| {name} | {rows['full'].nll_full:.2f} | {cells} |")
    stored = {row.policy: row for row in found["looks stored"].rows}
    for row in found["looks"].rows:
        if row.policy != "full":
            name = row.policy.removeprefix("select:0.15").strip("[]") or "as it is"
            looks.append(f"| {name} | {_added(row)} | {_added(stored[row.policy])} |")
    return "\n".join([*lines, "", *looks, ""])


def stored() -> str:
    """The primer where chunks are prefilled, and in no prompt."""
    study, other = _study("mtrag"), _study("mtrag-stored")
    rows = {row.policy: row for row in study.rows}
    lines = ["| policy | no primer | | stored | |", "| --- | --: | --- | --: | --- |"]
    lines += [
        f"| `{row.policy}` | {_added(rows[row.policy])} | {_added(row)} |"
        for row in sorted(other.rows, key=lambda row: row.fresh)
        if row.policy not in ("full", "exact")
    ]
    alone = [
        f"| `{name}` | {_added(rows[name])} | | |" for name in ("alone", "temperature:0.9", "temperature:0.8")
    ]
    return "\n".join([*lines, *alone, ""])


def _study(name: str) -> Study:
    return read_study(RESULTS / f"smollm2-{name}.json")


def _row(study: Study, policy: str) -> Row:
    return next(row for row in study.rows if row.policy == policy)


def _auto(*names: str) -> str:
    rows = [row for name in names for row in _study(name).gate_rows()]
    return cheapest_that_passed(rows, QueryConfig(), chunk_tokens=rows[0].chunk_tokens).policy.name


def _added(row: Row | None) -> str:
    if row is None:
        return " | "
    return f"{_signed(row.dnll)} | {_signed(row.dnll_low)} to {_signed(row.dnll_high)}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-0.00", "+0.00")


def _time(row: Row) -> str:
    return f"{row.ttft_ms:.0f} ms" if row.ttft_ms else ""


def _sooner(row: Row | None) -> str:
    return f"{row.ttft_speedup:.1f} x" if row is not None and row.ttft_speedup else ""
