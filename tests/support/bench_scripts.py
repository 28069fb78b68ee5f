"""Imports scripts of tests/bench, which are not a package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCH = str(Path(__file__).parents[1] / "bench")


def bench_script(name: str) -> ModuleType:
    """Returns the module tests/bench/NAME.py."""
    sys.path.insert(0, BENCH)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(BENCH)
