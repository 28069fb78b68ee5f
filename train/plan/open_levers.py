"""The memory levers that a config has not used yet and could: keys to set, the cheapest in time first. Pure.

In: a report with the config that was compiled (`Report.config`, keys of the trainer's configs/base.py). Out: `Lever`,
with the most that it can free by the rows of the report. A lever is a function and its place in LEVERS.
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
from bytescope.train.plan.state_rows import ZERO_STAGES

# Rows of the breakdown that grow with the batch, and those that are state of the parameters.
_BATCH_ROWS = ("residuals", "workspace", "logits_loss", "batch")
_STATE_ROWS = ("params", "frozen", "optimizer", "accumulator", "gradients")
# Policies that keep more than `selective` does, and those that keep no more than `full`.
_ABOVE_SELECTIVE = ("none", "dots", "minimal")
_LEAST_KEPT = ("full", "sqrt", "offload", "auto")
# What a micro-batch is chosen smaller than the rows at the peak would allow: not all of them shrink alike.
_MARGIN = 0.15
# Pieces of the sequence that an MLP is computed in, in positions.
_TILE = 4096


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
    return [lever for make in LEVERS if (lever := make(case)) is not None]


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
        frees |= dict.fromkeys(_BATCH_ROWS, 1.0)
    return Lever(keys, frees, True, "all of these", max(lever.adds for lever in used))


def flags(keys: Keys) -> str:
    """Keys as flags of the command line, quoted for a shell."""
    return shlex.join(f"--config.{key}={text}" for key, text in keys.items())


# ---- the levers -----------------------------------------------------------------------------------------------------


def _chunked_loss(case: Case) -> Lever | None:
    if case.flat["loss.kind"] != "full":
        return None
    return Lever({"loss.kind": "chunked"}, {"logits_loss": 1.0, "residuals": 1.0})


def _flash_attention(case: Case) -> Lever | None:
    if case.flat["model.attention"] != "naive":
        return None
    return Lever({"model.attention": "auto"}, {"residuals": 1.0, "workspace": 1.0})


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


def _selective(case: Case) -> Lever | None:
    if case.flat["remat.policy"] not in _ABOVE_SELECTIVE or case.flat["remat.layers"]:
        return None
    return Lever({"remat.policy": "selective"}, {"residuals": 1.0})


def _micro(case: Case) -> Lever | None:
    """The largest micro-batch that may fit, each of an update's micro-batches by the same rule."""
    micro = case.flat["batch.micro"]
    if micro < 2 or not case.accumulates:
        return None
    report = case.report
    moving = sum(report.breakdown.get(row, 0) for row in (*_BATCH_ROWS, "fragmentation"))
    room = moving - max(report.predicted_bytes - (report.limit_bytes or 0), 0)
    divisors = [size for size in range(1, min(micro // 2, 10**6) + 1) if micro % size == 0]
    size = max((size for size in divisors if moving * size <= (1 - _MARGIN) * room * micro), default=1)
    return Lever(
        _micro_keys(case, micro // size), dict.fromkeys(_BATCH_ROWS, 1 - size / micro), adds=_accumulator(case)
    )


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
    layers = bool(case.flat["remat.layers"])
    if case.flat["remat.policy"] in _LEAST_KEPT and not layers:
        return None
    cleared = {key: "" for key in ("remat.layers", "remat.save", "remat.offload") if case.flat[key]}
    keys = {"remat.policy": "full", **cleared}
    return Lever(keys, {"residuals": 1.0}, True, "every block runs forward twice")


def _parts(case: Case) -> Lever | None:
    """Attention and MLP recomputed one after the other, where a block's recomputation is what is left."""
    if case.flat["remat.policy"] not in ("full", "offload") or case.flat["remat.granularity"] != "block":
        return None
    return Lever({"remat.granularity": "parts"}, {"workspace": 0.5})


def _tiled_mlp(case: Case) -> Lever | None:
    length = case.flat["data.seq_len"] // max(case.axes["context"], 1)
    if case.flat["model.mlp_chunk"] or length < 2 * _TILE or length % _TILE:
        return None
    return Lever({"model.mlp_chunk": str(_TILE)}, {"workspace": 1.0, "residuals": 1.0})


def _blocks_to_host(case: Case) -> Lever | None:
    if not case.host_memory or case.axes["stage"] > 1 or case.flat["remat.policy"] not in ("full", "sqrt"):
        return None
    return Lever({"remat.policy": "offload"}, {"residuals": 1.0}, True, "block inputs cross the host link")


def _moments_to_host(case: Case) -> Lever | None:
    if not case.host_memory or case.flat["offload.optimizer"] or not case.by_layer:
        return None
    return Lever({"offload.optimizer": "true"}, {"optimizer": 1.0}, True, "moments cross the host link each update")


def _params_to_host(case: Case) -> Lever | None:
    streamed = case.flat["mesh.strategy"] in ("zero3", "ddp") or case.shared == 1
    if not case.host_memory or case.flat["offload.params"] or case.micro_steps > 1 or not streamed or not case.by_layer:
        return None
    return Lever(
        {"offload.optimizer": "true", "offload.params": "true"},
        {"optimizer": 1.0, "params": 1.0},
        True,
        "parameters and moments cross the host link",
    )


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


def _narrow_compute(case: Case) -> Lever | None:
    if case.flat["precision.preset"] != "fp32":
        return None
    return Lever({"precision.preset": "bf16"}, dict.fromkeys(_BATCH_ROWS, 0.5), False, "changes the arithmetic")


def _narrow_base(case: Case) -> Lever | None:
    """Frozen weights in 4 bits; tables, and what is left in 16 bits, are not told from matrices here."""
    if not case.adapters or case.flat["lora.base"] == "nf4":
        return None
    left = BASES["nf4"].size() / BASES[case.flat["lora.base"]].size()
    return Lever({"lora.base": "nf4"}, {"frozen": 1 - left}, False, "frozen weights are rounded to 4 bits")


def _narrow_moments(case: Case) -> Lever | None:
    if case.flat["optimizer.name"] != "adamw" or case.adapters:
        return None
    return Lever({"optimizer.name": "adamw_8bit"}, {"optimizer": 0.75}, False, "changes the arithmetic")


def _fused_update(case: Case) -> Lever | None:
    closed = (
        case.flat["optimizer.fused_backward"],
        case.micro_steps > 1,
        not case.flat["model.scan"],
        not case.by_layer,
        case.flat["remat.policy"] == "sqrt",
    )
    if any(closed):
        return None
    return Lever(
        {"optimizer.fused_backward": "true", "optimizer.clip": "layer"},
        {"gradients": 1.0},
        False,
        "each layer is clipped by its own norm",
    )


def _narrow_params(case: Case) -> Lever | None:
    if case.flat["precision.preset"] != "bf16" or case.adapters:
        return None
    return Lever(
        {"precision.preset": "bf16_params"}, {"params": 0.5, "gradients": 0.5}, False, "no float32 master parameters"
    )


def _smaller_batch(case: Case) -> Lever | None:
    micro = case.flat["batch.micro"]
    if micro < 2 or case.accumulates:
        return None
    return Lever({"batch.micro": str(micro // 2)}, dict.fromkeys(_BATCH_ROWS, 0.5), False, "a smaller batch per update")


def _shorter(case: Case) -> Lever | None:
    length = case.flat["data.seq_len"]
    if length < 2 or length % 2:
        return None
    return Lever({"data.seq_len": str(length // 2)}, dict.fromkeys(_BATCH_ROWS, 0.5), False, "shorter sequences")


# In the order of what they cost: first time, little of it, then much; then those that change the loss curve.
LEVERS: tuple[Callable[[Case], Lever | None], ...] = (
    _chunked_loss,
    _flash_attention,
    _selective,
    _micro,
    _zero3,
    _replicas,
    _tiled_mlp,
    _full,
    _parts,
    _blocks_to_host,
    _moments_to_host,
    _params_to_host,
    _expert_room,
    _narrow_compute,
    _narrow_base,
    _narrow_moments,
    _fused_update,
    _narrow_params,
    _smaller_batch,
    _shorter,
)
