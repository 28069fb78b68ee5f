"""Reads any compiled JAX program, down to the buffer: what every byte of its device memory is.

    from bytescope import memory
    report = memory.analyze(jax.jit(step).lower(state, batch))
    memory.assert_fits(jax.jit(step).lower(state, batch), "72GiB")

`bytescope report --help` is the same as a command. Importing this package does not import jax.
"""

from bytescope.memory.analyze import analyze
from bytescope.memory.errors import GuardError, ReportError
from bytescope.memory.guard import assert_fits
from bytescope.memory.parallel_records import Collective, Communication, ZeroRow
from bytescope.memory.records import Buffer, Finding, LedgerRow, Report, TimelinePoint, XlaStats, load

__all__ = ["Buffer", "Collective", "Communication", "Finding", "GuardError", "LedgerRow", "Report", "ReportError",
           "TimelinePoint", "XlaStats", "ZeroRow", "analyze", "assert_fits", "load"]
