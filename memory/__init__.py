"""Reads any compiled JAX program, down to the buffer: what every byte of its device memory is.

    from bytescope import memory
    report = memory.analyze(step, state, batch, target="h200", donate_argnums=0)
    report                                                    # in a notebook or at a prompt: what it holds
    memory.assert_fits(step, state, batch, target="h200", donate_argnums=0)

`bytescope report --help` is the same as a command. Importing this package imports nothing else; each name is fetched at
its first use, and none of them brings jax or what draws before it needs them.

Rooms, each importing only the ones before it: report_records (what a report lists), hlo (protos to records), formulas
(published arithmetic), devices (what a program is compiled for), steps (anyone's step, traced and lowered for a
target), arguments (what goes in), attribution (what every buffer is), costs (what a step computes, moves and sends),
remat (the least recomputation under a budget), profile (a profiler's trace), plan (many programs compared), text,
pages, tables (what users hold besides the report), report (the object that they hold), execution (steps that run),
remat_plan (the remat policy of any model), commands.
Start at `analyze.py`: a program in, a `records.Report` out.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bytescope.memory.devices.live import LiveMemory
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.errors import GuardError, ReportError
    from bytescope.memory.execution.executable import Executable, compile
    from bytescope.memory.execution.watched import Watched, watch
    from bytescope.memory.records import Finding, XlaStats
    from bytescope.memory.remat.recognition import RematPolicy
    from bytescope.memory.remat_plan.plan import RematPlan, plan_remat
    from bytescope.memory.report import Report, analyze, assert_fits, load
    from bytescope.memory.report_records.buffers import Buffer, LedgerRow, TimelinePoint
    from bytescope.memory.report_records.parallel import Collective, Communication, ZeroRow
    from bytescope.memory.tables.devices import live, target, targets
    from bytescope.memory.tables.difference import Difference, diff
    from bytescope.memory.tables.table import Table
else:  # with it, no type checker would find a misspelt name

    def __getattr__(name: str) -> Any:
        """A public name at its first use (PEP 562)."""
        package = sys.modules[__name__]
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=package)
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        setattr(package, name, value)
        return value


# Public name -> the module of this package that it comes from.
_HOMES = {
    **dict.fromkeys(("Report", "analyze", "assert_fits", "load"), "report"),
    **dict.fromkeys(("live", "target", "targets"), "tables.devices"),
    **dict.fromkeys(("Difference", "diff"), "tables.difference"),
    **dict.fromkeys(("Executable", "compile"), "execution.executable"),
    **dict.fromkeys(("Watched", "watch"), "execution.watched"),
    **dict.fromkeys(("RematPlan", "plan_remat"), "remat_plan.plan"),
    "RematPolicy": "remat.recognition",
    "Table": "tables.table",
    "Target": "devices.targets",
    "LiveMemory": "devices.live",
    **dict.fromkeys(("GuardError", "ReportError"), "errors"),
    **dict.fromkeys(("Finding", "XlaStats"), "records"),
    **dict.fromkeys(("Buffer", "LedgerRow", "TimelinePoint"), "report_records.buffers"),
    **dict.fromkeys(("Collective", "Communication", "ZeroRow"), "report_records.parallel"),
}

__all__ = [
    "Buffer",
    "Collective",
    "Communication",
    "Difference",
    "Executable",
    "Finding",
    "GuardError",
    "LedgerRow",
    "LiveMemory",
    "RematPlan",
    "RematPolicy",
    "Report",
    "ReportError",
    "Table",
    "Target",
    "TimelinePoint",
    "Watched",
    "XlaStats",
    "ZeroRow",
    "analyze",
    "assert_fits",
    "compile",
    "diff",
    "live",
    "load",
    "plan_remat",
    "target",
    "targets",
    "watch",
]


class _Package(ModuleType):
    """A package whose functions keep their names: Python would put a module `analyze` in the place of the function
    `analyze` as soon as anyone imports something from it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __dir__() -> list[str]:
    """What an editor or a prompt completes."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


sys.modules[__name__].__class__ = _Package
