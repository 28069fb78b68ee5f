"""Rows of the cache of `compare` that stay valid while files of this package are edited, for tests that expect them.

A row's name is a digest of the package's sources, which are read each time: an edit, a merge or an update of the
checkout while the tests run makes rows invalid, as it should. tests/memory/compare/test_pool.py tests that it does.
"""

import functools
from pathlib import Path

import pytest

from bytescope.memory.compare import row_cache

PACKAGE = Path(row_cache.__file__).parents[2]


def keep_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets digests see the files of this package as they are when a digest first reads them."""
    real = Path.read_bytes
    once = functools.cache(real)
    monkeypatch.setattr(Path, "read_bytes", lambda path: (once if path.is_relative_to(PACKAGE) else real)(path))
