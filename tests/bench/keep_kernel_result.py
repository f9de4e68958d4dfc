"""Keeps what `memkv bench kernel --device cuda --format json` found, with the hash of its sources.

python tests/bench/keep_kernel_result.py found.json h200
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sources import kernel_digest

RESULTS = Path(__file__).with_name("results")


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    found = {"gpu": found.pop("device"), **found, "source_hash": kernel_digest(), "stale_reason": ""}
    target = RESULTS / f"kernel-{sys.argv[2]}.json"
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
    main()
