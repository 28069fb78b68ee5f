"""Guards for other people's tests: a program's memory as an assertion.

    def test_step_fits():
        memory.assert_fits(step, state, batch, target="h100:8", donate_argnums=0)       # what the target has
        memory.assert_fits(jax.jit(step).lower(state, batch), "72GiB")                  # or any size

The same as a fixture of pytest, which finds it by itself: memory/pytest_guard.py.
"""

from __future__ import annotations

from typing import Any

from bytescope.memory.analysis import analyze, judge
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.errors import GuardError, ReportError
from bytescope.memory.program.compilation import takes_arguments
from bytescope.memory.records.report_record import POOL, ReportRecord
from bytescope.memory.units import human, parse_bytes, reads_as_size


def assert_fits(program: Any, *args: Any, size: int | str | None = None, **options: Any) -> ReportRecord:
    """Asserts that a program's predicted bytes, those of the report's verdict, are at most `size`; returns its report.

    Args:
        program, args, options: those of `memory.analyze`: a step with its arguments and a target, or what is lowered
            already; a report too.
        size: bytes of one device, or text such as "72GiB"; without arguments it may follow the program. None: what
            is available on one device of the target. A number below 1 MiB needs a unit: "512B".

    Raises:
      GuardError: an AssertionError: it does not fit; the message names what the peak is made of.
      ReportError: neither a size nor a limit is known, the size is not valid, or it is among the arguments of a step.
    """
    __tracebackhide__ = True  # pytest's: the test is where a reader has to look
    if len(args) == 1 and size is None and not takes_arguments(program):
        (size,), args = args, ()
    if args and isinstance(args[-1], str) and reads_as_size(args[-1]):
        raise ReportError(f"{args[-1]!r} as an argument of the step: give it by its name, size={args[-1]!r}")
    limit = None if size is None else parse_bytes(size)  # an invalid size is refused before anything is compiled
    report = program if isinstance(program, ReportRecord) else analyze(program, *args, **options)
    limit = report.limit_bytes if limit is None else limit
    if limit is None:
        raise ReportError('no size to compare with: give one as in assert_fits(program, "72GiB"), or a target')
    judged = judge(report, limit)
    if not judged.fits:
        share = limit_share(report.target, limit)
        error = GuardError(
            f"{report.program or 'the program'} takes {human(report.predicted_bytes)}, "
            f"{human(report.predicted_bytes - limit)} more than {human(limit)}"
            f"{f' ({share})' if share else ''}: {_parts(report)}"
        )
        error.report = judged
        raise error
    return report


def _parts(report: ReportRecord) -> str:
    """The largest rows of the peak, and what the compiler does not count of the allocator's pool."""
    rows = sorted(report.breakdown.items(), key=lambda row: -row[1])[:4]
    unseen = [(row.name, row.bytes) for row in report.unseen if row.where == POOL]
    return ", ".join(f"{row} {human(count)}" for row, count in (*rows, *unseen) if count)
