"""The table of audits, and the function that runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bytescope.memory.audit.checkpoint_names_audit import checkpoints
from bytescope.memory.audit.donations import donations
from bytescope.memory.audit.offloads import offloads
from bytescope.memory.audit.partitioner import gathered_arrays
from bytescope.memory.audit.randomness import randomness
from bytescope.memory.audit.xla_recomputation import with_xla_recomputation
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import JudgedProgram

Audit = Callable[[JudgedProgram, PlacedProgram], Iterable[AuditRow]]

AUDITS: tuple[Audit, ...] = (checkpoints, offloads, donations, randomness, gathered_arrays)


def audit(report: JudgedProgram, program: PlacedProgram) -> tuple[AuditRow, ...]:
    """Returns one row for each request of the program to jax and XLA. Requests that were not honored come first, and
    among them those with most bytes.

    report: the report of the program. program: the parsed program with its jaxpr; without a jaxpr, as for an HLO dump,
    the requests are unknown.
    """
    rows = [row for find_rows in AUDITS for row in find_rows(report, program)]
    rows = list(with_xla_recomputation(report, program, rows))
    return tuple(sorted(rows, key=lambda row: (row.honored is not False, row.honored is not None, -row.bytes)))
