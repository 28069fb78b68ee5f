"""Finds the memory savings ("levers") that a config does not use yet, those with the lowest cost in time first.

Input: a report with the compiled config (`Report.config`, with the keys of configs/base.py). Output: `Lever`, the
config keys to set and the maximum bytes that they can free. LEVERS lists the candidates in order: the name of a row of
the catalogue (`lever_catalogue.py`), or a function of this module for a lever that depends on sizes. This module
compiles nothing.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence

from bytescope.memory.findings.expert_findings import room_for, smaller_room
from bytescope.memory.formulas.adapter_formulas import BASES
from bytescope.memory.formulas.training_state import ZERO
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.plan.config_case import Case, Keys, case_of
from bytescope.train.plan.config_facts import ZERO_STAGES
from bytescope.train.plan.lever_catalogue import BATCH_ROWS, SAVINGS

# Categories of the memory breakdown that are proportional to the number of parameters.
_STATE_ROWS = ("params", "frozen", "optimizer", "accumulator", "gradients")
# A proposed micro-batch uses this fraction less than the memory at the peak allows, because not all categories shrink
# in proportion to the micro-batch.
_MARGIN = 0.15


@dataclasses.dataclass(frozen=True)
class Lever:
    """A memory saving ("lever") that a config could use: the config keys to set, and their effect.

    Attributes:
        keys: the keys to set, dotted key -> text.
        frees: category of the memory breakdown, such as "gradients" -> the largest fraction of it that is freed, 0.0 to
            1.0.
        curve: whether the loss curve stays the same.
        costs: a description of the cost; "" if it is negligible.
        adds: additional bytes on one device that the lever needs.
    """

    keys: Keys
    frees: Mapping[str, float]
    curve: bool = True
    costs: str = ""
    adds: int = 0

    @property
    def flags(self) -> str:
        """The config keys as command-line flags, quoted for a shell."""
        return flags(self.keys)

    def max_freed_bytes(self, report: ReportRecord) -> int:
        """Returns the maximum bytes on one device that the lever can free, minus the bytes that it needs itself.

        They are computed from the memory breakdown at the peak. Fragmentation counts as memory that can be freed.
        """
        rows = {**self.frees, "fragmentation": 1.0}
        freed = sum(share * report.breakdown.get(row, 0) for row, share in rows.items())
        return max(int(freed) - self.adds, 0)


def open_levers(report: ReportRecord) -> list[Lever]:
    """Returns the memory savings ("levers") that the config of a report does not use yet.

    Levers with the lowest cost in time come first, and levers that change the loss curve come last. The list is empty
    if the report is not about one of the trainer's configs.
    """
    case = case_of(report)
    if case is None:
        return []
    levers = []
    for row in LEVERS:
        lever = _lever_if_applicable(row, case) if isinstance(row, str) else row(case)
        if lever is not None:
            levers.append(lever)
    return levers


def combine_levers(levers: Sequence[Lever], report: ReportRecord) -> Lever | None:
    """Combines memory savings ("levers") into one: the config keys of all levers that keep the loss curve and use no
    host memory.

    Each lever is used at its strongest, for example with a micro-batch of 1. Returns None if there are fewer than two
    levers to combine.
    """
    case = case_of(report)
    used = [lever for lever in levers if lever.curve and not _uses_host(lever)]
    if case is None or len(used) < 2:
        return None
    keys: dict[str, str] = {}
    frees: dict[str, float] = {}
    for lever in used:
        keys |= lever.keys
        for row, share in lever.frees.items():
            frees[row] = max(share, frees.get(row, 0.0))
    if "batch.micro" in keys:
        keys |= _split_micro_batch_keys(case, case.flat["batch.micro"])
        frees |= dict.fromkeys(BATCH_ROWS, 1.0)
    return Lever(keys, frees, True, "all of these", max(lever.adds for lever in used))


def _uses_host(lever: Lever) -> bool:
    return lever.keys.get("remat.policy") == "offload" or any(key.startswith("offload.") for key in lever.keys)


def flags(keys: Keys) -> str:
    """Returns config keys as command-line flags `--config.KEY=TEXT`, quoted for a shell."""
    return shlex.join(f"--config.{key}={text}" for key, text in keys.items())


def parse_flags(text: str) -> list[tuple[str, str]]:
    """Returns the (key, text) pairs of flags that `flags` wrote."""
    pairs = (flag.removeprefix("--config.").partition("=") for flag in shlex.split(text))
    return [(key, value) for key, _, value in pairs]


# ---- the levers -----------------------------------------------------------------------------------------------------


def _lever_if_applicable(name: str, case: Case) -> Lever | None:
    row = SAVINGS[name]
    return Lever(row.all_keys, row.frees, row.same_curve, row.costs) if row.applies(case) else None


def _zero3(case: Case) -> Lever | None:
    strategy, devices = case.flat["mesh.strategy"], case.state_devices
    if devices < 2 or strategy == "zero3" or strategy not in ZERO_STAGES:
        return None
    rows = [row for row in _STATE_ROWS if row not in ZERO[ZERO_STAGES[strategy]]]
    return Lever({"mesh.strategy": "zero3"}, dict.fromkeys(rows, 1 - 1 / devices), True, "more collectives")


def _replicas(case: Case) -> Lever | None:
    data = case.axes["data"]
    if data < 2 or case.flat["mesh.strategy"] == "ddp" or not case.shards(data * case.state_devices):
        return None
    keys = {"mesh.data": "1", "mesh.fsdp": str(data * case.axes["fsdp"])}
    return Lever(keys, dict.fromkeys(_STATE_ROWS, 1 - 1 / data), True, "more collectives between replicas")


def _smaller_micro_batch(case: Case) -> Lever | None:
    micro, report = case.flat["batch.micro"], case.report
    if micro < 2 or not case.accumulates:
        return None
    shrinking = sum(report.breakdown.get(row, 0) for row in (*BATCH_ROWS, "fragmentation"))
    room = shrinking - max(report.predicted_bytes - (report.limit_bytes or 0), 0)
    chosen = 1
    for size in range(1, min(micro // 2, 10**6) + 1):
        if micro % size == 0 and shrinking * size <= (1 - _MARGIN) * room * micro:
            chosen = size
    # With accumulation there is a gradient accumulator, as large as the parameters.
    accumulator = report.breakdown.get("params", 0) if case.micro_steps == 1 else 0
    frees = dict.fromkeys(BATCH_ROWS, 1 - chosen / micro)
    return Lever(_split_micro_batch_keys(case, micro // chosen), frees, adds=accumulator)


def _split_micro_batch_keys(case: Case, times: int) -> dict[str, str]:
    keys = {"batch.micro": str(case.flat["batch.micro"] // times)}
    if not case.flat["batch.tokens"]:
        keys["batch.accumulation"] = str(times * case.micro_steps)
    if case.micro_steps == 1 and case.flat["batch.mode"] != "scan":
        keys["batch.mode"] = "scan"  # accumulation inside one step needs no accumulator besides the gradient
    return keys


def _full_recomputation(case: Case) -> Lever | None:
    lever = _lever_if_applicable("full", case)
    if lever is None:
        return None
    cleared = {key: "" for key in ("remat.layers", "remat.save", "remat.offload") if case.flat[key]}
    return dataclasses.replace(lever, keys={**lever.keys, **cleared})


def _lower_capacity_factor(case: Case) -> Lever | None:
    routing = case.routing
    smaller = smaller_room(*routing) if routing else None
    if routing is None or smaller is None:
        return None
    factor, room = smaller
    frees = dict.fromkeys(("residuals", "workspace", "collectives"), 1 - room.rows / room_for(*routing).rows)
    costs = f"token rows beyond {factor:g} times the mean are dropped"
    return Lever({"model.capacity_factor": f"{factor:g}"}, frees, False, costs)


def _store_frozen_in_nf4(case: Case) -> Lever | None:
    # An upper bound, because embedding tables and norms stay in 16 bits.
    lever = _lever_if_applicable("nf4_base", case)
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


# The candidates, those with the lowest cost in time first and those that change the loss curve last. A name is a row of
# the catalogue. A function returns a lever that depends on sizes.
LEVERS: tuple[str | Callable[[Case], Lever | None], ...] = (
    "loss",
    "attention",
    "selective",
    _smaller_micro_batch,
    _zero3,
    _replicas,
    "mlp_chunk",
    _full_recomputation,
    "parts",
    "offload_blocks",
    "offload",
    "offload_params",
    _lower_capacity_factor,
    "bf16",
    _store_frozen_in_nf4,
    "adamw_8bit",
    "fused_backward",
    "bf16_params",
    _smaller_batch,
    _shorter,
)
