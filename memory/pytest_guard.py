"""Fixtures for other people's tests of memory. pytest finds them where this package is installed (`pytest11`).

    def test_step_fits(assert_fits):
        assert_fits(step, state, batch, target="h100:8", donate_argnums=0)      # or size="72GiB"

    def test_logits_stay_small(memory_report):
        report = memory_report(step, state, batch, target="h100:8")
        assert report.breakdown["logits_loss"] < 2**30

Where such a test fails, pytest shows the memory report among its captured sections. This module is loaded in every run
of pytest of whoever has installed the package: it imports nothing but pytest, has no hooks and prints nothing. Leave
it out with `-p no:bytescope.memory.pytest_guard`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bytescope.memory.report.report_object import Report

# The width of a report in a log.
_WIDTH = 100


@pytest.fixture
def memory_report(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`memory.analyze`, for a test to call: its report is shown where the test fails."""

    def analyze(program: Any, *args: Any, **options: Any) -> Report:
        __tracebackhide__ = True
        from bytescope import memory

        try:
            report = memory.analyze(program, *args, **options)
        except memory.ReportError as error:
            raise error.with_traceback(None) from None
        _attach(request.node, report)
        return report

    return analyze


@pytest.fixture
def assert_fits(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`memory.assert_fits`, for a test to call: it raises GuardError, an AssertionError, where a program's predicted
    bytes are more than a size or than its target has; the report is shown where the test fails."""
    return _guard(request.node)


@pytest.fixture
def memory_guard(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """The older name of `assert_fits`."""
    return _guard(request.node)


def _guard(item: pytest.Item) -> Callable[..., Report]:
    """`memory.assert_fits`, which shows its report with a test."""

    def guard(program: Any, *args: Any, **options: Any) -> Report:
        __tracebackhide__ = True
        from bytescope import memory

        try:
            report = memory.assert_fits(program, *args, **options)
        except memory.GuardError as error:
            _attach(item, error.report)
            raise
        except memory.ReportError as error:  # what the test's author can mend is not mended in here
            raise error.with_traceback(None) from None
        _attach(item, report)
        return report

    return guard


def _attach(item: pytest.Item, report: Any) -> None:
    """Adds a report to what pytest shows of a test that fails."""
    from bytescope.memory.report import report_text
    from bytescope.memory.view.console import plain_text

    item.add_report_section("call", "memory", plain_text(report_text.render(report), _WIDTH))
