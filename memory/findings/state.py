"""Rules on parameters, moments and the sums of gradients: what is held twice, or whole."""

from __future__ import annotations

from bytescope.memory.attribution.placement import PlacedProgram
from bytescope.memory.findings.evidence import SMALL, STATE, Found
from bytescope.memory.records import Report
from bytescope.memory.units import human


def not_donated(report: Report, program: PlacedProgram) -> Found | None:
    """State whose argument and result each have memory of their own."""
    module, total = program.module, 0
    entry = module.computations.get(module.entry)
    outputs = [a.size for a in program.allocations if a.live_out and not a.entry_parameter and a.color == 0]
    roles = {b.name: b.category for b in report.buffers if b.phase == "argument"}
    for allocation in program.allocations:
        if not allocation.entry_parameter or allocation.live_out or entry is None:
            continue
        parameter = module.instructions.get(entry.parameters.get(allocation.parameter, -1))
        path = module.metadata(parameter).op_name if parameter else ""
        if roles.get(path) in STATE and allocation.size in outputs:
            outputs.remove(allocation.size)
            total += allocation.size
    if total <= SMALL * report.peak_bytes:
        return None
    return Found(total, f"{human(total)} of state is not donated: the old and the new are held at once")
