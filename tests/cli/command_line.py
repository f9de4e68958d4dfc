"""How tests call the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable

from click.testing import Result

COMMAND = [sys.executable, "-c", "from memkv.cli import main; main(prog_name='memkv')"]
SETTINGS = {"MEMKV_ENGINE__POOL_BYTES": "64M", "MEMKV_ENGINE__THREADS": "1"}

Run = Callable[..., Result]
