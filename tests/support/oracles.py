"""What tests compare with, or compile with, that may not be installed: then they skip, or fail where CI requires it.

A test names what it needs as `@pytest.mark.oracle("cuda")`; `pytest --require-oracles=cuda,xprof` makes a missing one a
failure.
"""

import importlib.util
import shutil
from collections.abc import Callable
from typing import NoReturn

import pytest

# The first of these on the path is the browser that pages are looked at with.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _plugin(module: str) -> Callable[[], bool]:
    def found() -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package around it is missing too
            return False

    return found


# oracle -> (whether it is here, how to get it)
ORACLES = {
    "cuda": (_plugin("jax_plugins.xla_cuda13"), "no compiler for GPUs: pip install 'bytescope[cuda]'"),
    "tpu": (_plugin("libtpu"), "no compiler for TPUs: pip install 'bytescope[tpu]'"),
    "xprof": (_plugin("xprof"), "xprof is not installed: pip install 'bytescope[test]'"),
    "chromium": (lambda: CHROMIUM is not None, "chromium is not installed (apt install chromium)"),
}
required: set[str] = set()  # from --require-oracles, by conftest.py


def require(*names: str) -> None:
    """Ends the test if one of these oracles is missing."""
    for name in names:
        found, remedy = ORACLES[name]
        if not found():
            _missing(name, remedy)


def _missing(name: str, remedy: str) -> NoReturn:
    if name in required:
        pytest.fail(f"{remedy} (--require-oracles={name})", pytrace=False)
    pytest.skip(remedy)
