"""Measures `memkv bench compare` and keeps the result, which the README quotes.

    python tests/bench/keep_comparison.py && python tests/docs/write_readme.py

Not part of the suite: it wants a quiet machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from memkv.bench.compare import Shape, run_comparison
from memkv.config import load_config

sys.path.insert(0, str(Path(__file__).parent))
from sources import ROOT, sources_digest

RESULT = ROOT / "tests" / "bench" / "results" / "compare-smollm2.json"


def main() -> None:
    sources = sources_digest()
    found = run_comparison(load_config(env={}), Shape(), lambda words: print(words, file=sys.stderr))
    kept = {"comparison": found, "sources": sources}
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
    print(RESULT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
