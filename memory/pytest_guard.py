"""Pytest fixtures that test the memory of a step. pytest loads them in every environment that has this package
(`pytest11`).

    def test_step_fits(assert_fits):
        assert_fits(step, state, batch, target="h100:8", donate_argnums=0)      # or budget="72GiB"

    def test_logits_stay_small(memory_report):
        report = memory_report(step, state, batch, target="h100:8")
        assert report.breakdown["logits_loss"] < 2**30

If such a test fails, pytest shows the memory report in a section of its output. Because pytest loads this module in
every run, the module imports only pytest, has no hooks and prints nothing. `-p no:bytescope.memory.pytest_guard`
disables it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bytescope.memory.report.report_object import Report

# Width of a report in the test log, in columns.
_WIDTH = 100


@pytest.fixture
def memory_report(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Pytest fixture: the function `memory.analyze`. If the test fails, pytest also shows the memory report."""

    def analyze(program: Any, *args: Any, **options: Any) -> Report:
        __tracebackhide__ = True
        from bytescope import memory

        try:
            report = memory.analyze(program, *args, **options)
        except memory.ReportError as error:
            raise error.with_traceback(None) from None
        _attach_report(request.node, report)
        return report

    return analyze


@pytest.fixture
def assert_fits(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Pytest fixture: the function `memory.assert_fits`. If the test fails, pytest also shows the memory report.

    The function raises GuardError, an AssertionError, if the predicted bytes of a program exceed a budget or the memory
    of its target.
    """

    def guard(program: Any, *args: Any, **options: Any) -> Report:
        __tracebackhide__ = True
        from bytescope import memory

        try:
            report = memory.assert_fits(program, *args, **options)
        except memory.GuardError as error:
            _attach_report(request.node, error.report)
            raise
        except memory.ReportError as error:  # hides the frames of this package: the test has the mistake
            raise error.with_traceback(None) from None
        _attach_report(request.node, report)
        return report

    return guard


def _attach_report(item: pytest.Item, report: Any) -> None:
    from bytescope.memory.report import report_text
    from bytescope.memory.view.console import plain_text

    item.add_report_section("call", "memory", plain_text(report_text.render(report), _WIDTH))
