"""Rules on host memory: offload that does not happen, and more than the host has."""

from __future__ import annotations

from bytescope.memory.config_keys import OFFLOAD
from bytescope.memory.findings.evidence import Found, words
from bytescope.memory.hlo.mesh import flat
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human


def idle_offload(report: ReportRecord, program: PlacedProgram) -> Found | None:
    """A program that asks for offload and holds nothing on the host."""
    wanted = any("offload" in word for word in words(report.config, "remat"))
    asked = [key for key, value in flat(report.config).items() if key.startswith(OFFLOAD) and value is True]
    if report.host_bytes or not (wanted or asked):
        return None
    return Found(0, f"{asked[0] if asked else 'the policy'} asks for offload, but nothing is in host memory")


def host_memory(report: ReportRecord, program: PlacedProgram) -> Found | None:
    """More in host memory than the host of the devices has."""
    available = int(report.target.get("host_memory_bytes") or 0)
    devices = min(int(report.target.get("devices_per_host") or 1), int(report.target.get("n_devices") or 1))
    size = report.host_bytes * devices
    if not available or size <= available:
        return None
    return Found(size, f"{human(size)} in host memory, which has {human(available)} for these devices")
