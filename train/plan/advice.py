"""Advice for a step that does not fit: the memory savings ("levers") left to try, the cheapest that fits, and the
`fit` command.

The input is a report with the program's config (`report.config`, with the keys of configs/base.py). `open_levers`
returns the levers, `try_levers` asks the caller's compiler for the bytes of the promising ones, and `lines` returns
the text. This module compiles nothing itself. A command that refuses a report (`report.fits is False`) prints the
advice like this:

    levers = open_levers(report)
    tried = try_levers(report, levers, bytes_of)  # bytes_of: config keys -> predicted bytes; [] without a compiler
    for line in lines(report, levers, tried, fit_command(name, target, overrides, report)):
        print(line)
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence

from bytescope.memory.findings.expert_findings import room_for, smaller_room
from bytescope.memory.formulas.adapter_formulas import BASES
from bytescope.memory.formulas.training_state import ZERO
from bytescope.memory.records.report_record import ReportRecord, RowName
from bytescope.memory.units import GIB, MIB, human
from bytescope.train.plan.config_facts import ZERO_STAGES
from bytescope.train.plan.lever_catalogue import BATCH_ROWS, SAVINGS, Case, Keys, case_of

# Maximum number of variants to compile, and the seconds within which every compile should end.
MAX_VARIANTS, MAX_SECONDS = 4, 30.0
# The fraction of a host's free memory that will most likely still be free when the next command begins.
LIKELY_FREE = 0.95
# Categories of the memory breakdown that are proportional to the number of parameters.
_STATE_ROWS: tuple[RowName, ...] = ("params", "frozen", "optimizer", "accumulator", "gradients")
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
    frees: Mapping[RowName, float]
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
        rows: dict[RowName, float] = {**self.frees, "fragmentation": 1.0}
        freed = sum(share * report.breakdown[row] for row, share in rows.items())
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
    frees: dict[RowName, float] = {}
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


@dataclasses.dataclass(frozen=True)
class TriedLever:
    """A memory saving ("lever": config keys that reduce memory) whose program was compiled to see whether it fits on a
    device.

    Attributes:
        lever: the memory saving.
        bytes: the predicted bytes of the program on one device; None if the program cannot run.
        why: the reason why the program cannot run; "" if it can.
    """

    lever: Lever
    bytes: int | None
    why: str = ""


def try_levers(
    report: ReportRecord,
    levers: Sequence[Lever],
    bytes_of: Callable[[Keys], int],
    tell: Callable[[str], None] = lambda line: None,
    each_s: float = 0.0,
) -> list[TriedLever]:
    """Compiles a training step that does not fit on a device with one memory saving ("lever": config keys to change)
    after another, until one fits. Returns the compiled variants.

    Only levers that keep the loss curve and can free at least the missing memory are compiled, those with the lowest
    cost in time first. The last variant combines all levers that keep the loss curve and use no host memory.

    Args:
        report: the report of the step that does not fit.
        levers: the candidates, from `open_levers`.
        bytes_of: returns the predicted bytes on one device of the program with the given config keys. It raises
            ValueError if the program cannot run.
        tell: called with a line of text before each compile.
        each_s: the seconds that one compile is expected to take; 0 if unknown. A compile that would end later than
            `MAX_SECONDS` after the first one began is not started.
    """
    if report.limit_bytes is None:
        return []
    missing = report.predicted_bytes - report.limit_bytes
    promising = [lever for lever in levers if lever.curve and lever.max_freed_bytes(report) >= missing][
        : MAX_VARIANTS - 1
    ]
    every = combine_levers(levers, report)
    if (
        every is not None
        and every.max_freed_bytes(report) >= missing
        and every.keys not in [lever.keys for lever in promising]
    ):
        promising.append(every)
    began, results = time.monotonic(), list[TriedLever]()
    for lever in promising:
        since = time.monotonic()
        if since - began + each_s > MAX_SECONDS:
            break
        tell(f"compiling with {lever.flags}")
        try:
            size = bytes_of(lever.keys)
        except ValueError as error:
            results.append(TriedLever(lever, None, " ".join(str(error).split())))
        else:
            results.append(TriedLever(lever, size))
            if size <= report.limit_bytes:
                break
        each_s = max(each_s, time.monotonic() - since)
    return results


def lines(report: ReportRecord, levers: Sequence[Lever], tried: Sequence[TriedLever], fit: str = "") -> list[str]:
    """Returns the advice for a step that does not fit, line by line.

    The advice lists the compiled variants, the memory savings ("levers": config keys to change) left to try, and the
    `bytescope fit` command.

    Args:
        report: the report of the step that does not fit.
        levers: the memory savings that the config does not use yet, from `open_levers`.
        tried: the variants that were compiled.
        fit: the `bytescope fit` command; "" to print none.
    """
    out: list[str] = []
    limit = report.limit_bytes or 0
    compiled = [(each.bytes, each.lever) for each in tried if each.bytes is not None]
    if compiled:
        out.append("compiled with one change, the cheapest first:")
    for size, lever in compiled:
        verdict = "fits" if size <= limit else f"{human(size - limit)} too much"
        out.append(f"  {human(size)}  {verdict}  {lever.flags}")
    bytes_known = any(report.breakdown.values())  # whether the report has the bytes of each category
    tried_levers = [each.lever for each in tried]
    left = [
        lever for lever in levers if lever not in tried_levers and (lever.max_freed_bytes(report) or not bytes_known)
    ]
    if left and not any(size <= limit for size, _ in compiled):
        sizes = ", with the maximum that each can free" if bytes_known else ""
        out.append(f"{'not compiled' if compiled else 'left to try'}, the cheapest first{sizes}:")
        out += [_format_lever(lever, report, bytes_known) for lever in left]
    if case_of(report) is not None and not levers:
        out.append(
            "the config already uses all memory savings: use a smaller model, shorter sequences "
            "(--config.data.seq_len), or more devices"
        )
    if fit and levers:
        out.append(f"to find the fastest configuration that fits, by compiling: {fit}")
    return out


def _format_lever(lever: Lever, report: ReportRecord, bytes_known: bool) -> str:
    line = "  "
    if bytes_known:
        frees, missing = lever.max_freed_bytes(report), report.predicted_bytes - (report.limit_bytes or 0)
        line += f"{human(frees)}  may be enough  " if frees >= missing > 0 else f"{human(frees)}  "
    return f"{line}{lever.flags}  ({lever.costs})" if lever.costs else line + lever.flags


def fit_command(config: str, target: str, overrides: Sequence[tuple[str, str]], report: ReportRecord) -> str:
    """Returns the `bytescope fit` command that searches for the fastest configuration of the same task, quoted for a
    shell.

    The command has the overrides except `remat.*` and `batch.*`, which the search chooses. The number of tokens per
    update stays the same. Returns "" if the report is not about one of the trainer's configs, or has no memory limit.

    Args:
        config: the config as the command line names it.
        target: the target as the command line names it; "" or "local" for the devices of this machine.
        overrides: pairs (dotted key, text) as the command line gives them.
        report: the report of the step that does not fit.
    """
    case = case_of(report)
    if case is None or report.limit_bytes is None:
        return ""
    words = ["bytescope", "fit", config]
    if target not in ("", "local"):
        words.append(target)
    limit: float = report.limit_bytes
    if report.target.get("platform") == "cpu":
        limit *= LIKELY_FREE
    # The budget is rounded down to a tenth of a GiB, or to a MiB if it is less than one GiB.
    budget = f"{math.floor(10 * limit / GIB) / 10:g}GiB" if limit >= GIB else f"{max(int(limit / MIB), 1)}MiB"
    words.append(f"--budget={budget}")
    if any(key.startswith("batch.") for key, _ in overrides):
        words.append(f"--batch-tokens={case.tokens}")
    words += [f"--config.{key}={text}" for key, text in overrides if not key.startswith(("remat.", "batch."))]
    return shlex.join(words)


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
    shrinking = sum(report.breakdown[row] for row in BATCH_ROWS) + report.breakdown["fragmentation"]
    room = shrinking - max(report.predicted_bytes - (report.limit_bytes or 0), 0)
    chosen = 1
    for size in range(1, min(micro // 2, 10**6) + 1):
        if micro % size == 0 and shrinking * size <= (1 - _MARGIN) * room * micro:
            chosen = size
    # With accumulation there is a gradient accumulator, as large as the parameters.
    accumulator = report.breakdown["params"] if case.micro_steps == 1 else 0
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
    freed = 1 - room.rows / room_for(*routing).rows
    costs = f"token rows beyond {factor:g} times the mean are dropped"
    frees: dict[RowName, float] = {"residuals": freed, "workspace": freed, "collectives": freed}
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
