"""Rows of parametrizations that only `pytest -m exhaustive` runs."""

from typing import Any

import pytest


def exhaustive(*rows: Any) -> list:
    """Marks rows of `pytest.mark.parametrize` as exhaustive; a tuple is a row of several arguments."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.exhaustive) for row in rows]
