"""The rows of a comparison: one per combination of keys. Finds the Pareto-optimal rows and the best row. Pure."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from bytescope.memory.compare.grids import CHANGE, CONFIG, EFFECT, TARGET, as_text
from bytescope.memory.devices.xla_flags import flags_text, is_flag
from bytescope.memory.records.buffer_records import RowName
from bytescope.memory.seconds import ranking
from bytescope.memory.units import column_unit, list_names

# The figures by which rows can be ranked: keys of the JSON.
MEASURED, PREDICTED, RECOMPUTED = "step_seconds", "predicted_seconds", "recompute_flops_fraction"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a comparison: one combination of config keys, and the memory, FLOPs and time of its program.

    Sizes are bytes on one device. FLOPs are per call of the step, over all devices.

    A factory may use a subclass that knows more about its keys (`train.plan.config_row.ConfigRow`). The subclass sets
    the class attributes and overrides the methods about keys.

    Class attributes:
        how: prefixes of keys that determine how a program runs, not what it computes. Rows that differ only in these
            keys are ranked against each other.
        policy_key: the key of the remat policy, which charts draw as one line per value; "" for none.
        policy_parts: keys whose values are shown as part of the policy's value.

    Fields:
        overrides: dotted key of the grid -> value. Includes `config` and `target` if they vary.
        status: "ok", or a one-line reason why the row has no figures.
        peak_bytes: device memory at the peak.
        allocated_bytes: device memory that the runtime allocates: arguments, outputs, constants, temporaries.
        temp_bytes: temporary values in device memory.
        host_bytes: bytes in host memory, which no other field includes.
        to_host_bytes, to_device_bytes: bytes copied from device to host memory and back.
        residual_bytes: residuals in `breakdown`; if no residual is live at the peak, the residuals at the highest point
            of the timeline that has any.
        recompute_flops_fraction: FLOPs recomputed by jax.checkpoint / model FLOPs.
        kernel_recompute_flops: FLOPs recomputed inside the gradients of attention and loss kernels.
        model_flops, hardware_flops: FLOPs without and with all recomputation.
        compile_seconds: time from tracing to the executable, while other workers compile too.
        tokens_per_update: tokens per optimizer update, over all devices.
        predicted_seconds, predicted_seconds_low, predicted_seconds_high: predicted time of one optimizer update with
            all its calls of the step (`memory.seconds.step_prediction`), and the ends of its interval.
        predicted_tokens_per_s, predicted_mfu: tokens/s over all devices, and model FLOPs utilization (fraction, 0 to
            1), at the predicted time.
        predicted_by_term: part of the predicted time (a term of `seconds.schedule_walk.TERMS`) -> seconds; their sum is
            predicted_seconds.
        rates: the source of the device rates behind the prediction, in one line.
        unpredicted: the reason why a row with figures has no predicted seconds, "" otherwise.
        least_seconds: lower bound of the seconds per update, from the data sheet's peak rates (`memory.cost.roofline`).
        batch, policy: texts that describe the batch of an update, and the residuals that layers keep for the backward
            pass.
        breakdown: category of buffers -> bytes at the peak.
        limit_bytes: memory available on the device.
        fits: whether the allocated bytes are within the limit.
        xla_recomputes: whether XLA's own rematerialization pass recomputes values, because the program exceeds XLA's
            memory limit. Its FLOPs are in the predicted time, but not in `recompute_flops_fraction`.
        xla_margin_bytes: bytes by which the program is below XLA's memory limit; negative above it, None if unknown.
        pareto: whether the row is Pareto-optimal: it fits, and no fitting row of the same workload has fewer bytes at
            equal or less time. Time is measured, otherwise predicted; if neither is known, recomputation replaces it.
        formula: figures of the published formulas, a `formulas.reconcile.Formula` as JSON. None without --formulas or
            if no formula applies.
        change, effect: texts of a what-if: what the row changes, and how the program differs from the program as given;
            "" in other comparisons.
        measured: {"step_seconds": median seconds of one update, "tokens_per_s", "peak_bytes" or None}. None without
            --measure.
    """

    how: ClassVar[tuple[str, ...]] = ()
    policy_key: ClassVar[str] = ""
    policy_parts: ClassVar[tuple[str, ...]] = ()

    overrides: Mapping[str, Any]
    status: str = "ok"
    peak_bytes: int | None = None
    allocated_bytes: int | None = None
    temp_bytes: int | None = None
    host_bytes: int | None = None
    to_host_bytes: int | None = None
    to_device_bytes: int | None = None
    residual_bytes: int | None = None
    recompute_flops_fraction: float | None = None
    kernel_recompute_flops: float | None = None
    model_flops: float | None = None
    hardware_flops: float | None = None
    compile_seconds: float | None = None
    tokens_per_update: int | None = None
    predicted_seconds: float | None = None
    predicted_seconds_low: float | None = None
    predicted_seconds_high: float | None = None
    predicted_tokens_per_s: float | None = None
    predicted_mfu: float | None = None
    predicted_by_term: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rates: str = ""
    unpredicted: str = ""
    least_seconds: float | None = None
    batch: str = ""
    policy: str = ""
    breakdown: Mapping[RowName, int] = dataclasses.field(default_factory=dict)
    limit_bytes: int | None = None
    fits: bool | None = None
    xla_recomputes: bool = False
    xla_margin_bytes: int | None = None
    pareto: bool = False
    change: str = ""
    effect: str = ""
    measured: Mapping[str, float | None] | None = None
    formula: Mapping[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """True if the program compiled. A row of a failed program has no memory, FLOPs or time."""
        return self.status == "ok"

    @classmethod
    def from_answer(cls, overrides: Mapping[str, Any], values: Mapping[str, Any]) -> Self:
        """Returns the comparison row of one combination.

        overrides: config key -> value of the combination. values: the worker's answer, the figures of the program by
        name. Keys of the answer that are not fields of Row are ignored.
        """
        known = {f.name for f in dataclasses.fields(cls)} - {"overrides", "pareto"}
        row = cls(dict(overrides), **{key: value for key, value in values.items() if key in known})
        return dataclasses.replace(row, **ranking.fields(values))

    @classmethod
    def is_how(cls, key: str) -> bool:
        """Returns whether a config key, such as the remat policy, changes how the program runs but not what it
        computes. Rows that differ only in such keys are ranked against each other."""
        return key in (CHANGE, EFFECT) or (bool(cls.how) and key.startswith(cls.how))

    @classmethod
    def flag(cls, key: str, value: Any) -> str:
        """Returns the word that sets a key to this value, such as `width=256` or --xla=FLAG=VALUE, without shell
        quotes."""
        return f"--xla={flags_text({key: value})}" if is_flag(key) else f"{key}={as_text(value)}"

    def command(self, source: str, target: str, given: str) -> str:
        """Returns the command line of `bytescope report` that compiles the program of this row.

        source: the program, such as MODULE:FUNCTION, unless the row has another. target: the name of the target, ""
        to leave it out, unless the row has another. given: the words that are the same for all rows.
        """
        words = [str(self.overrides.get(key, word)) for key, word in ((CONFIG, source), (TARGET, target))]
        return " ".join(filter(None, ("bytescope report", shlex.join(filter(None, words)), given, flags(self))))

    def value_text(self, key: str) -> str:
        """Returns the text of the row's value for a config key of the compared grid, "" if the row does not have the
        key."""
        if key in (CHANGE, EFFECT):
            return self.change if key == CHANGE else self.effect
        return as_text(self.overrides.get(key, ""))

    def names_a_policy(self) -> bool:
        """Returns whether the row selects its remat policy by name alone, such as "full", and lists no tensors or
        layers. Among rows with equal time, recomputation and memory, a row with a named policy is preferred."""
        return True


@dataclasses.dataclass(frozen=True)
class FlaggedRow(Row):
    """A row of a comparison with the command-line flags that select it.

    Fields, in addition to those of `Row`:
        flags: the flags that set this row's config keys, quoted for a shell.
    """

    flags: str = ""


@dataclasses.dataclass(frozen=True)
class TaskRow(FlaggedRow):
    """The best row of a task.

    Fields, in addition to those of `FlaggedRow`:
        task: the keys that identify the task; "" if there is one task.
    """

    task: str = ""


@dataclasses.dataclass(frozen=True)
class CompareResult:
    """The result of bytescope compare. Sizes are bytes on ONE device, None if unknown.

    Fields:
        rows: one per combination of keys, or per option of XLA.
        best: the best row that fits. None if no row fits, or if the rows are of several tasks, because rows of
            different tasks cannot be compared.
        best_of_each: the best row of each task that has a fitting row.
        config: the name of the config or program.
        given: the keys set on the command line, as flags.
        target: the devices that were compiled for, with only the key `name` if there are several targets.
        versions: package -> version used for compiling.
        interrupted: whether combinations are missing because Ctrl-C stopped the comparison.
        unchanged: variants of a what-if whose program is the program as given, or nearly; () in other comparisons.
        left_out: variant of a what-if -> the reason why it was not compiled; {} in other comparisons.
    """

    rows: Sequence[Row]
    best: FlaggedRow | None
    best_of_each: Sequence[TaskRow]
    config: str
    given: str
    target: Mapping[str, Any]
    versions: Mapping[str, str]
    interrupted: bool
    unchanged: Sequence[str]
    left_out: Mapping[str, str]


def varying(rows: Sequence[Row]) -> list[str]:
    """Returns the config keys whose values differ between the rows. If no value differs, returns the key of the remat
    policy. Keys whose values are shown as part of the policy's value (`Row.policy_parts`) are left out.

    The rows of a what-if change different keys, so that they have CHANGE and EFFECT instead of keys."""
    if any(row.change for row in rows):
        return [CHANGE, EFFECT]
    keys = list(dict.fromkeys(key for row in rows for key in row.overrides))
    if any(row.policy_key in keys for row in rows):
        keys = [key for key in keys if not any(key in row.policy_parts for row in rows)]
    varied = [key for key in keys if len({(key in row.overrides, row.value_text(key)) for row in rows}) > 1]
    return varied or [key for key in keys if any(key == row.policy_key for row in rows)]


def unit_of(rows: Sequence[Row]) -> tuple[str, int]:
    """Returns (name, bytes) of the unit in which these rows' bytes are shown: the largest unit in which every row has
    at least 0.1."""
    return column_unit(min((row.allocated_bytes for row in rows if row.allocated_bytes), default=0))


def label(row: Row, keys: Sequence[str]) -> str:
    """Returns a short description of a row by its values for the config keys `keys`, such as "full, seq_len=4096"
    (remat policy "full")."""
    if CHANGE in keys:
        return row.change
    parts = []
    for key in (key for key in keys if key in row.overrides):
        name = "" if key in (row.policy_key, CONFIG, TARGET) else f"{key.rpartition('.')[2]}="
        parts.append(name + row.value_text(key))
    return ", ".join(parts) or "as configured"


def mark_pareto(rows: Sequence[Row]) -> list[Row]:
    """Returns copies of the rows with the field `pareto` set. A row is Pareto-optimal if it fits its memory limit, and
    no other fitting row of the same task (the same computation) is better in bytes or cost without being worse in the
    other.

    The cost is measured or predicted seconds per token, or recomputation if no time is known (`cost_of`).
    """
    rivals = [row for row in rows if row.ok and row.fits is not False and row.allocated_bytes is not None]
    optimal = set()
    for group in tasks(rivals).values():
        optimal |= _pareto_optimal_ids(group)
    return [dataclasses.replace(row, pareto=id(row) in optimal) for row in rows]


def tells_rows_apart(rows: Sequence[Row]) -> bool:
    """Returns whether a mark at Pareto-optimal rows says anything: some rows that fit are Pareto-optimal, and some are
    not."""
    return len({row.pareto for row in rows if row.ok and row.fits is not False}) == 2


def _pareto_optimal_ids(rows: Sequence[Row]) -> set[int]:
    _, cost = cost_of(rows)
    out: set[int] = set()
    min_cost, last = math.inf, None
    # By increasing bytes: a row is optimal if it costs less than all rows before it.
    for row in sorted(rows, key=lambda row: (row.allocated_bytes, cost(row))):
        point = row.allocated_bytes, cost(row)
        if last is None or point == last or point[1] < min_cost:
            out.add(id(row))
            min_cost, last = min(min_cost, point[1]), point
    return out


def best(rows: Sequence[Row]) -> Row | None:
    """Returns the best row that fits its memory limit. Returns None if no row fits, or if the rows are of several
    tasks, that is, their programs do not compute the same.

    The best row is the fastest by measurement; without measurements, the fastest by prediction; without predictions,
    the row that recomputes least. Among rows whose predictions differ by less than a small fraction (`ranking.TIE`),
    less recomputation and then less memory decide.
    """
    if len({workload(row) for row in rows}) > 1:
        return None
    fitting = [row for row in rows if row.ok and row.fits and row.allocated_bytes is not None]
    name, cost = cost_of(fitting)
    if name == PREDICTED:
        return ranking.preferred(fitting, cost, thrift)
    return min(fitting, key=lambda row: (cost(row), row.allocated_bytes), default=None)


def tied(rows: Sequence[Row], winner: Row) -> list[Row]:
    """Returns the rows that fit, compute the same as `winner` and are predicted to be as fast, within a small fraction.
    `winner`, the best row, is left out. Returns [] if the rows are not ranked by predicted time."""
    fitting = [
        row
        for row in rows
        if row.ok and row.fits and row.allocated_bytes is not None and workload(row) == workload(winner)
    ]
    name, cost = cost_of(fitting)
    return [row for row in ranking.ties(fitting, cost) if row is not winner] if name == PREDICTED else []


def beyond_xla_limit(rows: Sequence[Row]) -> str:
    """Returns a sentence about the rows above XLA's memory limit, if other rows are below it: their seconds are then
    hard to compare. In rows above the limit, XLA's rematerialization pass recomputes values, or its scheduler overlaps
    less. Returns "" otherwise."""
    compiled = [row for row in rows if row.ok]
    recomputing = [row for row in compiled if row.xla_recomputes]
    beyond = recomputing or [row for row in compiled if (row.xla_margin_bytes or 0) < 0]
    if not 0 < len(beyond) < len(compiled):
        return ""
    keys = varying(rows)
    named = list_names([label(row, keys) for row in beyond], separator="; ")
    if keys == [rows[0].policy_key]:
        named = f"{'policy' if len(beyond) == 1 else 'policies'} {named}"
    counted = f"{len(beyond)} of {len(compiled)} programs ({named})"
    if not recomputing:
        return (
            f"above XLA's memory limit: {counted}; XLA schedules for less memory and less overlap there, which is part "
            "of the seconds"
        )
    return (
        f"XLA's rematerialization pass recomputes values in {counted}, because of XLA's memory limit: its work is part "
        "of the seconds"
    )


def thrift(row: Row) -> tuple[float, int, bool]:
    """Returns the key by which rows with equal predicted time are sorted. Rows with less recomputation (in whole
    percent of the model FLOPs) come first, then rows with less device and host memory in total, then rows with a named
    remat policy."""
    return (
        round(row.recompute_flops_fraction or 0.0, 2),
        (row.allocated_bytes or 0) + (row.host_bytes or 0),
        not row.names_a_policy(),
    )


def best_of_each(rows: Sequence[Row]) -> list[Row]:
    """Returns the best row of each task (rows that compute the same). Tasks without a fitting row are left out."""
    return [winner for group in tasks(rows).values() if (winner := best(group))]


def tasks(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows by what their programs compute: `workload` -> its rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(workload(row), []).append(row)
    return groups


def flags(row: Row) -> str:
    """Returns the command-line flags that set this row's config keys, quoted for a shell. The config and the
    target are left out, because they are words of their own."""
    return shlex.join(row.flag(key, value) for key, value in row.overrides.items() if key not in (CONFIG, TARGET))


def make_result(
    rows: Sequence[Row],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    interrupted: bool = False,
    config: str = "",
    given: str = "",
    unchanged: Sequence[str] = (),
    left_out: Mapping[str, str] = {},
) -> CompareResult:
    """Returns the result of a comparison, with the best of its rows. The arguments are fields of `CompareResult`."""
    rows = mark_pareto(rows)
    winner, keys = best(rows), task_keys(rows)
    of_each = [
        TaskRow(**vars(row), flags=flags(row), task=label(row, keys) if keys else "") for row in best_of_each(rows)
    ]
    return CompareResult(
        rows=rows,
        best=FlaggedRow(**vars(winner), flags=flags(winner)) if winner else None,
        best_of_each=of_each,
        config=config,
        given=given,
        target=target,
        versions=versions,
        interrupted=interrupted,
        unchanged=unchanged,
        left_out=left_out,
    )


def workload(row: Row) -> str:
    """Returns a string that identifies what a row's program computes: its values of the keys for model, batch and
    target. Rows with different strings are not comparable."""
    return repr(sorted((key, as_text(value)) for key, value in row.overrides.items() if not row.is_how(key)))


def task_keys(rows: Sequence[Row]) -> list[str]:
    """Returns the config keys that differ between the rows and change what the program computes."""
    return [key for key in varying(rows) if not rows[0].is_how(key)]


def cost_of(rows: Sequence[Row]) -> tuple[str, Callable[[Row], float]]:
    """Returns (name, function) of the cost by which these rows are ranked. The function returns a row's cost, infinity
    if unknown. The name is MEASURED, PREDICTED or RECOMPUTED.

    The cost is measured seconds per token if any row was measured, otherwise predicted seconds per token. If no time is
    known, the cost is recomputed FLOPs / model FLOPs. In a what-if the number of tokens need not be known.
    """
    if any(row.measured for row in rows):
        return MEASURED, lambda row: _per_token((row.measured or {}).get("tokens_per_s"))
    if any(row.predicted_tokens_per_s for row in rows):
        return PREDICTED, lambda row: _per_token(row.predicted_tokens_per_s)
    if any(row.change for row in rows) and any(row.predicted_seconds for row in rows):  # all have the same batch
        return PREDICTED, lambda row: row.predicted_seconds or math.inf
    return RECOMPUTED, lambda row: math.inf if row.recompute_flops_fraction is None else row.recompute_flops_fraction


def _per_token(speed: float | None) -> float:
    return 1 / speed if speed else math.inf
