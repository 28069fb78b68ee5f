"""A rule on pipelines of a config of the trainer's: what their stages hold by the schedule, and what all of them
allocate."""

from __future__ import annotations

from bytescope.memory.config_keys import MODEL_N_LAYERS, PIPELINE_SCHEDULE, PIPELINE_VIRTUAL
from bytescope.memory.errors import ReportError
from bytescope.memory.findings.evidence import NOTABLE, TOY, Found
from bytescope.memory.findings.remedies.case import case_of
from bytescope.memory.findings.remedies.open_levers import flags
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.pipeline.schedule_figures import held_share, simulate
from bytescope.memory.pipeline.schedules import make_schedule
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human

# The schedule whose stages hold the same, with its chunks.
EVEN, CHUNKS = "v", 2


def uneven_stash(report: ReportRecord, program: PlacedProgram) -> Found | None:
    """Residuals that the stages of one program allocate and most of them do not need, where a V needs less on all."""
    case = case_of(report)
    stages = case.axes["stage"] if case is not None else 1
    if case is None or stages == 1 or case.flat[PIPELINE_SCHEDULE] == EVEN:
        return None
    layers = case.flat[MODEL_N_LAYERS]
    sizes = stages, case.micro_steps
    try:
        now = make_schedule(case.flat[PIPELINE_SCHEDULE], *sizes, case.flat[PIPELINE_VIRTUAL])
        even = make_schedule(EVEN, *sizes, CHUNKS)
        share = held_share(even, layers) / held_share(now, layers)
    except ReportError:  # too few layers for two chunks a stage
        return None
    held = report.breakdown.get("residuals", 0)
    less = int(held * (1 - share))
    if less <= max(NOTABLE * report.peak_bytes, TOY):
        return None
    slot = held / max(now.stash_slots)
    needed = ", ".join(f"{slot * slots / 2**30:.2f}" for slots in now.stash_slots)
    then, today = (f"{100 * simulate(schedule).bubble:.1f} %" for schedule in (even, now))
    return Found(
        less,
        f"by the schedule the stages hold {needed} GiB of residuals at once, and one program allocates "
        f"{human(held)} on each",
        f"two chunks a stage, placed as a V, should free {human(less)} of them on each; the bubble is {then} "
        f"then, {today} now",
        flags({PIPELINE_SCHEDULE: EVEN, PIPELINE_VIRTUAL: str(CHUNKS)}),
    )
