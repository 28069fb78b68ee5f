"""Rules on host memory: offload that does not happen, and more than the host has."""

from __future__ import annotations

from bytescope.memory.findings.evidence import Found
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.units import human


def idle_offload(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """A program that asks for offload and holds nothing on the host."""
    asked = program.facts.asked_of_host if program.facts else ()
    if report.host_bytes or not asked:
        return None
    return Found(0, f"{asked[0]} asks for offload, but nothing is in host memory")


def host_memory(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """More in host memory than the host of the devices has."""
    available = int(report.target.get("host_memory_bytes") or 0)
    devices = min(int(report.target.get("devices_per_host") or 1), int(report.target.get("n_devices") or 1))
    size = report.host_bytes * devices
    if not available or size <= available:
        return None
    return Found(size, f"{human(size)} in host memory, which has {human(available)} for these devices")
