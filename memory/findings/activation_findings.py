"""Rules on what a step computes and keeps: logits, residuals, how they are packed."""

from __future__ import annotations

from bytescope.memory.findings.evidence import LARGE, NOTABLE, TOY, Found, at_peak, largest, told
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.units import human


def full_logits(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Logits or their gradients alive at the peak."""
    size = report.breakdown["logits_loss"]
    if size <= NOTABLE * report.peak_bytes:
        return None
    return Found(size, f"logits and loss hold {human(size)} at the peak, {largest(report, 'logits_loss')}")


def wide_activations(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """float32 residuals in a program that computes in bfloat16."""
    wide = sum(b.bytes for b in at_peak(report, "residuals") if b.shape and b.dtype == "float32")
    made = any(b.dtype == "bfloat16" for b in report.buffers if b.phase != "argument")
    asked = made or (program.facts is not None and program.facts.compute == "bfloat16")
    if not asked or wide <= max(LARGE * report.peak_bytes, TOY):
        return None
    message = f"{human(wide)} of residuals are float32 in a bfloat16 program"
    if report.target.get("platform") == "cpu":
        return Found(
            wide,
            f"{message}; the CPU computes bfloat16 in float32",
            "compile for the device that it will run on, such as target='h200', where bfloat16 stays narrow",
        )
    first = max((b for b in at_peak(report, "residuals") if b.shape and b.dtype == "float32"), key=lambda b: b.bytes)
    return Found(wide, f"{message}, the largest {told(first)}")


def fragmentation(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Holes in the packed memory."""
    size = report.breakdown["fragmentation"]
    if size <= max(LARGE * report.allocated_bytes, TOY):
        return None
    return Found(size, f"{human(size)} of the allocated memory is not in use at the peak")
