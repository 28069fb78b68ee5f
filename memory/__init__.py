"""Reads any compiled JAX program, down to the buffer: what every byte of its device memory is.

    from bytescope import memory
    report = memory.analyze(jax.jit(step).lower(state, batch))
    memory.assert_fits(jax.jit(step).lower(state, batch), "72GiB")

`bytescope report --help` is the same as a command. Importing this package imports neither jax nor what draws.

Rooms, each importing only the ones before it: hlo (protos to records), formulas (published arithmetic), devices (what a
program is compiled for), attribution (what every buffer is), costs (what a step computes, moves and sends), remat (the
least recomputation under a budget), profile (a profiler's trace), plan (many programs compared), text, pages, commands.
Start at `analyze.py`: a program in, a `records.Report` out.
"""

from bytescope.memory.analyze import analyze
from bytescope.memory.errors import GuardError, ReportError
from bytescope.memory.guard import assert_fits
from bytescope.memory.parallel_records import Collective, Communication, ZeroRow
from bytescope.memory.records import Buffer, Finding, LedgerRow, Report, TimelinePoint, XlaStats, load

__all__ = ["Buffer", "Collective", "Communication", "Finding", "GuardError", "LedgerRow", "Report", "ReportError",
           "TimelinePoint", "XlaStats", "ZeroRow", "analyze", "assert_fits", "load"]
