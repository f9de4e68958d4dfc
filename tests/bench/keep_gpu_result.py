"""Keeps what a bench found on a GPU, with the hash of the sources that its figures depend on.

python tests/bench/keep_gpu_result.py kernel h200 FOUND        of `memkv bench kernel --format json`
python tests/bench/keep_gpu_result.py engine h200 FOUND LOAD   of `memkv bench engine` and `memkv bench load`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sources import engine_digest, kernel_digest

RESULTS = Path(__file__).with_name("results")
DIGESTS = {"kernel": kernel_digest, "engine": engine_digest}


def main(kind: str, name: str, path: str, *others: str) -> None:
    found = json.loads(Path(path).read_text())
    found = {"gpu": found.pop("device"), **found}
    for other in others:
        found["load"] = json.loads(Path(other).read_text())["load"]
    found |= {"source_hash": DIGESTS[kind](), "stale_reason": ""}
    target = RESULTS / f"{kind}-{name}.json"
    target.write_text(json.dumps(_rounded(found), indent=2) + "\n")
    print(target)


def _rounded(value: object) -> object:
    """Four digits are more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(of) for key, of in value.items()}
    return [_rounded(of) for of in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
