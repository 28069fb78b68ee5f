"""`memory.assert_fits` as a pytest fixture.

    pytest_plugins = ["bytescope.memory.pytest_guard"]  # in conftest.py

    def test_step_fits(memory_guard):
        memory_guard(jax.jit(step).lower(state, batch), "72GiB")
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bytescope.memory.report import Report, assert_fits


@pytest.fixture
def memory_guard() -> Callable[..., Report]:
    """`memory.assert_fits`, for a test to call: it raises GuardError where the program does not fit."""
    return assert_fits
