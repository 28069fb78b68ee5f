"""The memory levers that a config has not used yet and could: keys to set, the cheapest in time first. Pure.

In: a report with the config that was compiled (`Report.config`, keys of the trainer's configs/base.py). Out: `Lever`,
with the most that it can free by the rows of the report. Savings of the catalogue have a row there; what depends on
sizes is a function here. LEVERS has their order.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence

from bytescope.memory.findings.expert_findings import room_for, smaller_room
from bytescope.memory.formulas.adapter_formulas import BASES
from bytescope.memory.formulas.training_state import ZERO
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.plan.config_case import Case, Keys, case_of, schedule
from bytescope.train.plan.config_facts import ZERO_STAGES
from bytescope.train.plan.lever_catalogue import BATCH_ROWS, SAVINGS

# Rows of the breakdown that are state of the parameters.
_STATE_ROWS = ("params", "frozen", "optimizer", "accumulator", "gradients")
# What a micro-batch is chosen smaller than the rows at the peak would allow: not all of them shrink alike.
_MARGIN = 0.15


@dataclasses.dataclass(frozen=True)
class Lever:
    """Keys that make a step smaller.

    Fields:
        keys: dotted key -> text. frees: row of the breakdown -> the largest share of it that goes, 0.0 to 1.0.
        curve: whether the loss curve stays what it is. costs: what the lever costs, in words. adds: bytes of one device
        that it takes besides.
    """

    keys: Keys
    frees: Mapping[str, float]
    curve: bool = True
    costs: str = ""
    adds: int = 0

    @property
    def flags(self) -> str:
        """What to add to the command, quoted for a shell."""
        return flags(self.keys)

    def most(self, report: ReportRecord) -> int:
        """The most bytes of one device that the lever can free, by the rows at the peak; what packs worse than it has
        to counts as freed."""
        rows = {**self.frees, "fragmentation": 1.0}
        return max(int(sum(share * report.breakdown.get(row, 0) for row, share in rows.items())) - self.adds, 0)


def open_levers(report: ReportRecord) -> list[Lever]:
    """The levers that the config of a report has not used and could, cheapest in time first; those that change the loss
    curve come last. [] for a program without a config of the trainer's, or without a lever left."""
    case = case_of(report)
    if case is None:
        return []
    levers = []
    for row in LEVERS:
        lever = _saving(row, case) if isinstance(row, str) else row(case)
        if lever is not None:
            levers.append(lever)
    return levers


def together(levers: Sequence[Lever], report: ReportRecord) -> Lever | None:
    """All levers that keep the curve and stay on the device, at their strongest, as one; None for fewer than two."""
    case = case_of(report)
    used = [
        lever
        for lever in levers
        if lever.curve
        and not any(key.startswith("offload.") for key in lever.keys)
        and lever.keys.get("remat.policy") != "offload"
    ]
    if case is None or len(used) < 2:
        return None
    keys: dict[str, str] = {}
    frees: dict[str, float] = {}
    for lever in used:
        keys |= lever.keys
        frees |= {row: max(share, frees.get(row, 0.0)) for row, share in lever.frees.items()}
    if "batch.micro" in keys:
        keys |= _micro_keys(case, case.flat["batch.micro"])
        frees |= dict.fromkeys(BATCH_ROWS, 1.0)
    return Lever(keys, frees, True, "all of these", max(lever.adds for lever in used))


def flags(keys: Keys) -> str:
    """Keys as flags of the command line, quoted for a shell."""
    return shlex.join(f"--config.{key}={text}" for key, text in keys.items())


# ---- the levers -----------------------------------------------------------------------------------------------------


def _saving(name: str, case: Case) -> Lever | None:
    """Returns the lever of a row of the catalogue; None where it does not apply."""
    row = SAVINGS[name]
    return Lever(row.all_keys, row.frees, row.same_curve, row.costs) if row.applies(case) else None


def _zero3(case: Case) -> Lever | None:
    strategy, shared = case.flat["mesh.strategy"], case.shared
    if shared < 2 or strategy == "zero3" or strategy not in ZERO_STAGES:
        return None
    rows = [row for row in _STATE_ROWS if row not in ZERO[ZERO_STAGES[strategy]]]
    return Lever({"mesh.strategy": "zero3"}, dict.fromkeys(rows, 1 - 1 / shared), True, "more collectives")


def _replicas(case: Case) -> Lever | None:
    data = case.axes["data"]
    if data < 2 or case.flat["mesh.strategy"] == "ddp" or not case.shards(data * case.shared):
        return None
    keys = {"mesh.data": "1", "mesh.fsdp": str(data * case.axes["fsdp"])}
    return Lever(keys, dict.fromkeys(_STATE_ROWS, 1 - 1 / data), True, "more collectives between replicas")


def _micro(case: Case) -> Lever | None:
    """The largest micro-batch that may fit, each of an update's micro-batches by the same rule."""
    micro = case.flat["batch.micro"]
    if micro < 2 or not case.accumulates:
        return None
    report = case.report
    moving = sum(report.breakdown.get(row, 0) for row in (*BATCH_ROWS, "fragmentation"))
    room = moving - max(report.predicted_bytes - (report.limit_bytes or 0), 0)
    divisors = [size for size in range(1, min(micro // 2, 10**6) + 1) if micro % size == 0]
    size = max((size for size in divisors if moving * size <= (1 - _MARGIN) * room * micro), default=1)
    return Lever(_micro_keys(case, micro // size), dict.fromkeys(BATCH_ROWS, 1 - size / micro), adds=_accumulator(case))


def _accumulator(case: Case) -> int:
    """Bytes of a sum of gradients that accumulating will hold, as large as the parameters; 0 where it is there."""
    return case.report.breakdown.get("params", 0) if case.micro_steps == 1 else 0


def _micro_keys(case: Case, times: int) -> dict[str, str]:
    """The keys of an update of `times` as many micro-batches, with as many sequences in all."""
    keys = {"batch.micro": str(case.flat["batch.micro"] // times)}
    if case.flat["batch.accumulation_schedule"]:
        steps = ",".join(f"{start}:{times * count}" for start, count in schedule(case.flat))
        return {**keys, "batch.accumulation_schedule": steps}
    if not case.flat["batch.tokens"]:
        keys["batch.accumulation"] = str(times * case.micro_steps)
    # Accumulated within one step: one accumulator, which is the gradient.
    return keys if case.micro_steps > 1 or case.flat["batch.mode"] == "scan" else {**keys, "batch.mode": "scan"}


def _full(case: Case) -> Lever | None:
    """Full recomputation, with what a config keeps by name cleared."""
    lever = _saving("full", case)
    cleared = {key: "" for key in ("remat.layers", "remat.save", "remat.offload") if case.flat[key]}
    return lever and dataclasses.replace(lever, keys={**lever.keys, **cleared})


def _expert_room(case: Case) -> Lever | None:
    """Room for fewer rows of experts than could come."""
    shape = case.routing
    found = smaller_room(*shape) if shape else None
    if shape is None or found is None:
        return None
    room, (factor, less) = room_for(*shape), found
    return Lever(
        {"model.capacity_factor": f"{factor:g}"},
        dict.fromkeys(("residuals", "workspace", "collectives"), 1 - less.rows / room.rows),
        False,
        f"rows of experts beyond {factor:g} times the mean are dropped",
    )


def _narrow_base(case: Case) -> Lever | None:
    """Frozen weights in 4 bits; tables, and what is left in 16 bits, are not told from matrices here."""
    lever = _saving("nf4_base", case)
    if lever is None:
        return None
    left = BASES["nf4"].size() / BASES[case.flat["lora.base"]].size()
    return dataclasses.replace(lever, frees={"frozen": 1 - left})


def _smaller_batch(case: Case) -> Lever | None:
    micro = case.flat["batch.micro"]
    if micro < 2 or case.accumulates:
        return None
    return Lever({"batch.micro": str(micro // 2)}, dict.fromkeys(BATCH_ROWS, 0.5), False, "a smaller batch per update")


def _shorter(case: Case) -> Lever | None:
    length = case.flat["data.seq_len"]
    if length < 2 or length % 2:
        return None
    return Lever({"data.seq_len": str(length // 2)}, dict.fromkeys(BATCH_ROWS, 0.5), False, "shorter sequences")


# In the order of what they cost: first time, little of it, then much; then those that change the loss curve. A name is
# a row of the catalogue; a function makes what depends on sizes.
LEVERS: tuple[str | Callable[[Case], Lever | None], ...] = (
    "loss",
    "attention",
    "selective",
    _micro,
    _zero3,
    _replicas,
    "mlp_chunk",
    _full,
    "parts",
    "offload_blocks",
    "offload",
    "offload_params",
    _expert_room,
    "bf16",
    _narrow_base,
    "adamw_8bit",
    "fused_backward",
    "bf16_params",
    _smaller_batch,
    _shorter,
)
