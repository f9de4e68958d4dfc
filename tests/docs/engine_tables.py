"""What the kept runs of `memkv bench engine` say, as README.md shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from memkv.bench.timeline import Timeline, drawn

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
_PEERS = {"transformers": "transformers", "continuous_batching": "its continuous batching"}


def engine() -> str:
    """First tokens by context and policy, from far tiers, and decode."""
    found: dict[str, Any] = json.loads((RESULTS / "engine-h200.json").read_text())
    sizes, rows = found["sizes"], found["ttft"]
    policies = sizes["policies"]
    names = " | ".join(f"`{name}`" for name in policies)
    lines = [
        f"{found['gpu']}, {found['model']}, {found['dtype']}, chunks of {sizes['chunk']} tokens and "
        f"{sizes['question']} question tokens; from the request to the token on the host, chunks resident, "
        f"without retrieval; medians of {sizes['rounds']}. transformers with torch's own attention, in the "
        "same run.",
        "",
        f"| retrieved tokens | full prefill | transformers | {names} |",
        f"| --: | --: | --: |{' --: |' * len(policies)}",
    ]
    for context in sorted({row["context"] for row in rows}):
        times = {row["policy"]: row for row in rows if row["context"] == context and row["tier"] == "device"}
        cells = [
            times["off"]["ms"],
            times["off"]["transformers_ms"],
            *(times[name]["ms"] for name in policies),
        ]
        lines.append(f"| {context:,} | {' | '.join(_ms(value) for value in cells)} |")
    lines += [
        "",
        "| where the chunks are | policy | first token | of it loading | loads at | beside |",
        "| --- | --- | --: | --: | --: | --- |",
    ]
    beside = {
        "host": f"{found['host_link_gbs']:.1f} GB/s of one large copy",
        "disk": f"{found['disk_read_gbs']:.2f} GB/s of a plain parallel read of the same files",
    }
    for row in rows:
        tier = row["tier"]
        if tier != "device":
            rate = f"{found[f'{tier}_load_gbs']:.{1 if tier == 'host' else 2}f} GB/s"
            lines.append(
                f"| {tier}, {row['context']:,} tokens | `{row['policy']}` | {_ms(row['ms'])} | "
                f"{_ms(row['load_ms'])} | {rate} | {beside[tier]} |"
            )
    if "disk_verify_share" in found:
        lines += [
            "",
            f"Verification took {found['disk_verify_share']:.1%} of the time of the loads from disk, beside "
            f"the reads of others{_behind_reads(found)}; what comes from host memory was verified on its way "
            "there.",
        ]
    for timeline in found.get("timeline", []):
        lines += ["", "```text", drawn(msgspec.convert(timeline, Timeline)), "```"]
    peers = [name for name in _PEERS if any(name in row["peers_ms"] for row in found["decode"])]
    lines += [
        "",
        f"| answers at once, each behind {sizes['batch_context']:,} mapped tokens | a token of each | "
        f"weights and KV read once |{''.join(f' {_PEERS[name]} |' for name in peers)}",
        f"| --: | --: | --: |{' --: |' * len(peers)}",
    ]
    for row in found["decode"]:
        times = (row["ms"], row["floor_ms"], *(row["peers_ms"].get(name) for name in peers))
        lines.append(f"| {row['batch']} | {' | '.join('' if at is None else _ms(at) for at in times)} |")
    for row in found["decode"]:
        for name, why in row.get("peers_failed", {}).items():
            lines += ["", f"{_PEERS[name]}, {row['batch']} at once: {why}"]
    written = found["ingest_tokens_per_s"] * _bytes_per_token(found) / 1e9
    lines += [
        "",
        f"Ingest: {found['ingest_tokens_per_s']:,.0f} tokens a second, computed, written and synced, which "
        f"is {written:.2f} GB/s of KV where a plain write of that disk gives {found['disk_write_gbs']:.2f}; "
        f"the bare model's pass over the same ids gives {found['forward_tokens_per_s']:,.0f}.",
        "",
        *_load(found.get("load", [])),
        *([found["stale_reason"], ""] if found["stale_reason"] else []),
    ]
    return "\n".join(lines)


def _load(rows: list[dict[str, Any]]) -> list[str]:
    """A replayed trace, where one is kept."""
    if not rows:
        return []
    of = rows[0]
    ttft, itl = of["objectives"]["ttft_ms"] / 1e3, of["objectives"]["itl_ms"]
    return [
        f"The first {of['requests']} requests of a trace of conversations, at {of['rate']:g} times its rate. "
        "Every 512 tokens but the question are a chunk, at first on disk. Good is a request whose first "
        f"token comes within {ttft:g} s, the others {itl:g} ms apart on average.",
        "",
        "| reuse | good | good ones a second | first token, median | p99 | between tokens, median | p99 |",
        "| --- | --: | --: | --: | --: | --: | --: |",
        *(
            f"| `{row['policy']}` | {row['good_share']:.0%} | {row['goodput']:.2f} | "
            + " | ".join(
                _ms(row[name]) for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
            )
            + " |"
            for row in rows
        ),
        "",
    ]


def _bytes_per_token(found: dict[str, Any]) -> int:
    """Of the one shape that is kept: 32 layers, 8 heads of 128, two bytes, keys and values."""
    assert found["model"].startswith("llama-3.1-8b") and found["kv_dtype"] == "bfloat16"
    return 32 * 8 * 128 * 2 * 2


def _behind_reads(found: dict[str, Any]) -> str:
    """What verification adds where everything else overlaps, by the timeline from disk."""
    for timeline in found.get("timeline", []):
        ends = {
            what: max((e["end_ms"] for e in timeline["events"] if e["what"] == what), default=0.0)
            for what in ("read", "verified")
        }
        if timeline["tier"] == "disk" and all(ends.values()):
            return f", and ended {ends['verified'] - ends['read']:.0f} ms behind the last of them"
    return ""


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"
