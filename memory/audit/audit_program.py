"""The table of audits, and the function that runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bytescope.memory.audit.checkpoint_names_audit import checkpoints
from bytescope.memory.audit.donations import donations
from bytescope.memory.audit.offloads import offloads
from bytescope.memory.audit.partitioner import gathered_arrays
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import JudgedProgram

Audit = Callable[[JudgedProgram, PlacedProgram], Iterable[AuditRow]]

AUDITS: tuple[Audit, ...] = (checkpoints, offloads, donations, gathered_arrays)


def audit(report: JudgedProgram, program: PlacedProgram) -> tuple[AuditRow, ...]:
    """Returns one row for each request of a program: something that the user's code asks jax or XLA to do, such as to
    recompute, save, offload or donate a value. Requests that were not honored come first; within each group, the rows
    are sorted by bytes, largest first.

    Args:
        report: the report of the compiled step.
        program: the compiled step with its buffers and its jaxpr. Without a jaxpr (an HLO dump), it is unknown what the
            user's code asks for, and the field `asked` of the rows is "unknown".
    """
    rows = [row for find_rows in AUDITS for row in find_rows(report, program)]
    return tuple(sorted(rows, key=lambda row: (row.honored is not False, row.honored is not None, -row.bytes)))
