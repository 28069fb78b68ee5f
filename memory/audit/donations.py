"""Audits donations: whether a result reuses the memory of each donated argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.program.pairing import root_of
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import JudgedProgram


def donations(report: JudgedProgram, program: PlacedProgram) -> Iterator[AuditRow]:
    """Yields one row for the donated arrays of each argument that were reused, and one for those that were not. The
    request is unknown for a program without a signature, such as a dump: then only the reused arrays are listed."""
    reused = {parameter for _, parameter, _ in program.module.aliases}
    rows: dict[tuple[str, str], AuditRow] = {}
    for allocation in program.allocations:
        argument = program.arguments.by_number.get(allocation.parameter) if allocation.entry_parameter else None
        if argument is None or allocation.color:
            continue
        done = "reused" if allocation.parameter in reused else "copied"
        if not argument.donated and (program.jaxpr is not None or done == "copied"):
            continue
        key = root_of(argument.path), done
        if key not in rows:
            asked = "donate" if argument.donated else "unknown"
            rows[key] = AuditRow("donation", key[0], asked=asked, done=done, count=0)
        row = rows[key]
        rows[key] = dataclasses.replace(row, bytes=row.bytes + allocation.size, count=row.count + 1)
    for row in rows.values():
        message = ""
        if row.honored is False:
            message = "no result has the shape, dtype and sharding of the donated array: return an array of this type"
        yield dataclasses.replace(row, undone_by="lowering" if message else "", message=message)
