"""A rule on pipelines whose stages run one program: what each stage holds by the schedule, and what all allocate."""

from __future__ import annotations

from bytescope.memory.findings.evidence import NOTABLE, TOY, Found
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.units import human


def uneven_stash(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Residuals that the stages of one program allocate and most of them do not need, where a V needs less on all."""
    pipeline = program.facts.pipeline if program.facts else None
    if pipeline is None or pipeline.v_share is None:
        return None
    held = report.breakdown.get("residuals", 0)
    less = int(held * (1 - pipeline.v_share))
    if less <= max(NOTABLE * report.peak_bytes, TOY):
        return None
    slot = held / max(pipeline.slots)
    needed = ", ".join(f"{slot * slots / 2**30:.2f}" for slots in pipeline.slots)
    return Found(
        less,
        f"by the schedule the stages hold {needed} GiB of residuals at once, and one program allocates "
        f"{human(held)} on each",
        f"two chunks a stage, placed as a V, should free {human(less)} of them on each; the bubble is "
        f"{100 * pipeline.v_bubble:.1f} % then, {100 * pipeline.bubble:.1f} % now",
    )
