"""Runs import-linter on an assembled tree: `python tests/docs/lint_imports.py build/tree`.

The finder of an editable installation would answer `import memkv` with the checkout, where api/ and
migrations/ do not stand inside the package; it is taken out first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from importlinter.cli import lint_imports

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def main(tree: Path) -> int:
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    os.chdir(tree)
    sys.path.insert(0, str(tree.resolve()))
    return int(
        lint_imports(config_filename=str(PYPROJECT), cache_dir=str(PYPROJECT.parent / ".import_linter_cache"))
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
