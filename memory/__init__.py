"""Reports what every byte of device memory holds in a compiled JAX program.

    from bytescope import memory
    report = memory.analyze(step, state, batch, target="h200", donate_argnums=0)
    report                                                    # in a notebook or at a prompt: shows itself
    memory.assert_fits(step, state, batch, target="h200", donate_argnums=0)

`bytescope report --help` describes the same function as a command. Importing this package imports none of its modules.
Each public name is imported at its first use, and jax and the drawing libraries are imported only when they are
needed.

Folders, each importing only from the folders before it: records (the parts of a report), hlo (readers of the compiler's
protos), formulas (published arithmetic), host
(memory of the computer), devices (compile targets), allocators (models of jax's GPU allocators),
program (the user's function and arguments, lowered for a target), peak (the content and live range of every buffer),
cost (FLOPs, bytes and collectives of a step), seconds (predicted step time), remat (the least recomputation under a
memory budget), findings (problems with their remedies), audit (requests to jax and XLA with their outcomes), view
(tables, charts and pages), messages (out-of-memory messages in a log, read and explained), report (the `Report` object
with its pages, differences and guards), watching (running steps), profile (profiler traces), compare (many programs
side by side), adapters (steps of other
trainers), commands.

Start at `analysis.py:report_of`. It takes a compiled program and returns a `records.report_record.ReportRecord`.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bytescope.memory.devices.live import LiveMemory
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.errors import GuardError, ReportError
    from bytescope.memory.formulas.model_facts import ModelFacts
    from bytescope.memory.messages.explanation import Explanation, explain
    from bytescope.memory.program.script_capture import captured_step
    from bytescope.memory.records.buffer_records import Buffer, LedgerRow, TimelinePoint
    from bytescope.memory.records.parallel_records import Collective, Communication, ZeroRow
    from bytescope.memory.records.report_record import Finding, XlaStats
    from bytescope.memory.remat.recognition import RematPolicy
    from bytescope.memory.report.allocator_table import replay
    from bytescope.memory.report.difference import Difference, diff
    from bytescope.memory.report.remat_plan import RematPlan
    from bytescope.memory.report.remat_planning import plan_remat
    from bytescope.memory.report.report_object import Report, analyze, assert_fits, load
    from bytescope.memory.subjects.opening import subject
    from bytescope.memory.view.object_table import Table
    from bytescope.memory.watching.device_tables import live, target, targets
    from bytescope.memory.watching.executable import Executable, compile
    from bytescope.memory.watching.watched import Watched, watch
else:  # hidden from type checkers, which would accept any name of the module with it

    def __getattr__(name: str) -> Any:
        """Returns a public name of the package. Its module is imported only when the name is first used (PEP 562)."""
        package = sys.modules[__name__]
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=package)
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        setattr(package, name, value)
        return value


# Public name -> the module that defines it, relative to this package.
_HOMES = {
    **dict.fromkeys(("Report", "analyze", "assert_fits", "load"), "report.report_object"),
    **dict.fromkeys(("live", "target", "targets"), "watching.device_tables"),
    **dict.fromkeys(("Difference", "diff"), "report.difference"),
    **dict.fromkeys(("Executable", "compile"), "watching.executable"),
    **dict.fromkeys(("Watched", "watch"), "watching.watched"),
    "replay": "report.allocator_table",
    "RematPlan": "report.remat_plan",
    "plan_remat": "report.remat_planning",
    "RematPolicy": "remat.recognition",
    "Table": "view.object_table",
    "Target": "devices.targets",
    "LiveMemory": "devices.live",
    **dict.fromkeys(("GuardError", "ReportError"), "errors"),
    "ModelFacts": "formulas.model_facts",
    "captured_step": "program.script_capture",
    "subject": "subjects.opening",
    **dict.fromkeys(("Explanation", "explain"), "messages.explanation"),
    **dict.fromkeys(("Finding", "XlaStats"), "records.report_record"),
    **dict.fromkeys(("Buffer", "LedgerRow", "TimelinePoint"), "records.buffer_records"),
    **dict.fromkeys(("Collective", "Communication", "ZeroRow"), "records.parallel_records"),
}

__all__ = [
    "Buffer",
    "Collective",
    "Communication",
    "Difference",
    "Executable",
    "Explanation",
    "Finding",
    "GuardError",
    "LedgerRow",
    "LiveMemory",
    "ModelFacts",
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
    "captured_step",
    "compile",
    "diff",
    "explain",
    "live",
    "load",
    "plan_remat",
    "replay",
    "subject",
    "target",
    "targets",
    "watch",
]


def __dir__() -> list[str]:
    """Returns the public names of the package, which editors and prompts complete."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
