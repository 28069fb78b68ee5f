"""Guards for other people's tests: a program's memory as an assertion.

    def test_step_fits():
        memory.assert_fits(jax.jit(step).lower(state, batch), "72GiB")

The same as a pytest fixture: memory/pytest_guard.py.
"""

from __future__ import annotations

from typing import Any

from bytescope.memory.analyze import analyze
from bytescope.memory.errors import GuardError, ReportError
from bytescope.memory.records import Report
from bytescope.memory.units import human, parse_bytes


def assert_fits(program: Any, size: int | str | None = None, **options: Any) -> Report:
    """Asserts that a program's allocated bytes are at most `size`; returns its report.

    `program` and `options` are those of `memory.analyze`. Without a `size` the target's limit is the bound.

    Raises:
      GuardError: an AssertionError: it does not fit; the message names what the peak is made of.
      ReportError: there is neither a size nor a limit.
    """
    report = program if isinstance(program, Report) else analyze(program, **options)
    limit = report.limit_bytes if size is None else parse_bytes(size)
    if limit is None:
        raise ReportError("no size to compare with: give one as in assert_fits(program, \"72GiB\"), or a target")
    if report.allocated_bytes > limit:
        rows = sorted(report.breakdown.items(), key=lambda row: -row[1])[:4]
        parts = ", ".join(f"{row} {human(count)}" for row, count in rows if count)
        raise GuardError(f"{report.program or 'the program'} takes {human(report.allocated_bytes)}, "
                         f"{human(report.allocated_bytes - limit)} more than {human(limit)}: {parts}")
    return report
