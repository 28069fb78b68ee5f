"""Rules on recomputation: what XLA recomputes by itself, and what a policy could keep or let go."""

from __future__ import annotations

import re

from bytescope.memory.attribution.placement import PlacedProgram
from bytescope.memory.findings.evidence import Found
from bytescope.memory.records import Report

_REMAT = re.compile(r"\.remat(\d+)?(\.|$)")


def xla_remat(report: Report, program: PlacedProgram) -> Found | None:
    """XLA's rematerialization pass recomputes values to fit the device."""
    names = {i.name for i in program.module.instructions.values() if _REMAT.search(i.name)}
    if not names:
        return None
    size = sum(b.bytes for b in report.buffers if b.name in names)
    return Found(size, f"XLA's own rematerialization pass recomputes {len(names)} values, {min(names)} among them")
