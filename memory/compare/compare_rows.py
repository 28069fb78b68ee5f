"""Combinations of a config's keys compared: rows, the Pareto-optimal ones and the best one. Pure.

The JSON of a comparison has these keys (sizes are bytes on ONE device, null where nothing is known):

- `rows`: one object per combination, the fields of `Row`.
- `best`: the best row that fits, with `flags`, what to add to the command line to use it; null for none, and where the
  rows are of several tasks, which cannot be compared.
- `best_of_each`: the same for each task of which a row fits, with `task`, what tells it from the others.
- `config`, `given`: the config's name, and the keys of the command line as its flags.
- `target`: what it was compiled for; `versions`: name -> version of what compiled it.
- `interrupted`: whether combinations are missing because the run was stopped.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from bytescope.memory.compare.grids import CONFIG, TARGET, as_text
from bytescope.memory.seconds import ranking
from bytescope.memory.units import column_unit

# What rows are ranked by -> the field that a picture shows of it.
MEASURED, PREDICTED, RECOMPUTED = "step_seconds", "predicted_seconds", "recompute_flops_fraction"


# Terms of predicted seconds that need more words than their names.
TERM_WORDS = {
    "collectives": "waiting for collectives",
    "host_link": "waiting for host memory",
    "memory": "moving memory",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One combination. Sizes are bytes on one device; FLOPs are of one call of the step, all devices together.

    A factory that knows more of its keys has a subclass (`train.plan.config_row.ConfigRow`); it sets the class
    attributes and the methods that are about keys.

    Class attributes:
        how: prefixes of keys that say how a program runs, not what it computes. Rows that differ only in these compete.
        policy_key: the key that charts draw as one line per value; "" for none.
        policy_parts: keys whose values are shown as a part of the policy's.

    Fields:
        overrides: dotted key -> value, the keys of the grid; `config` and `target` among them if they vary.
        status: "ok", or in one line why there are no figures.
        peak_bytes, allocated_bytes, temp_bytes, host_bytes, to_host_bytes, to_device_bytes, breakdown: as in a report.
        residual_bytes: of `breakdown`; where the peak holds none, residuals at the highest point that does.
        recompute_flops_fraction: FLOPs recomputed by jax.checkpoint, over model FLOPs.
        kernel_recompute_flops: FLOPs recomputed inside the gradients of attention and loss kernels.
        model_flops, hardware_flops: without and with everything that is recomputed.
        compile_seconds: from tracing to the executable, while other workers compile too.
        tokens_per_update: per optimizer update, over all devices.
        predicted_seconds: per update, all its calls of the step (`memory.seconds.step_prediction`), and with
            predicted_seconds_low and predicted_seconds_high its spread; predicted_tokens_per_s, over all devices, and
            predicted_mfu: at these seconds. predicted_by_term: term of `seconds.schedule_walk.TERMS` -> seconds,
            which add up to predicted_seconds. rates: where those of the target's devices are from, in one line.
        unpredicted: the reason why a row with figures has no predicted seconds; "" otherwise.
        least_seconds: per update, by the data sheet's peaks (`memory.cost.roofline`): a bound, not a prediction.
        batch, policy: what an update is made of, and what the layers keep for the backward pass, in words.
        limit_bytes: what the device has available; fits: whether the allocated bytes are within it.
        pareto: Pareto-optimal: it fits, and no row of the same workload that fits has fewer bytes at no more time: as
            measured, else as predicted; recomputation where nothing is known of time.
        formula: the same by the published formulas, a `formulas.reconcile.Formula` as JSON; None without --formulas, or
            where there are none.
        measured: {"step_seconds": median of one update, "tokens_per_s", "peak_bytes" or None}, None without --measure.
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
    breakdown: Mapping[str, int] = dataclasses.field(default_factory=dict)
    limit_bytes: int | None = None
    fits: bool | None = None
    pareto: bool = False
    measured: Mapping[str, float | None] | None = None
    formula: Mapping[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether the row has figures."""
        return self.status == "ok"

    @classmethod
    def from_answer(cls, overrides: Mapping[str, Any], values: Mapping[str, Any]) -> Self:
        """The row of a worker's answer, fresh or cached; keys that are not fields are left out."""
        known = {f.name for f in dataclasses.fields(cls)} - {"overrides", "pareto"}
        row = cls(dict(overrides), **{key: value for key, value in values.items() if key in known})
        return dataclasses.replace(row, **ranking.fields(values))

    @classmethod
    def is_how(cls, key: str) -> bool:
        """Returns whether a key says how a program runs, not what it computes: rows that differ only in such keys
        compete."""
        return key.startswith(cls.how) if cls.how else False

    @classmethod
    def flag(cls, key: str, value: Any) -> str:
        """The flag that gives a key of the grid this value, not quoted."""
        return f"--grid={key}={as_text(value)}"

    def command(self, source: str, target: str, given: str) -> str:
        """The command that shows this row again.

        source: the program, as --program takes it. target: its name. given: flags of the comparison.
        """
        words = ["bytescope", "compare", f"--program={source}", *([f"--target={target}"] if target else [])]
        return " ".join(filter(None, (shlex.join(words), given, flags(self))))

    def value_text(self, key: str) -> str:
        """The value of a grid key as people read it."""
        return as_text(self.overrides.get(key, ""))

    def names_a_policy(self) -> bool:
        """Returns whether one policy with a name says how the program runs. Of equal rows such a row is preferred."""
        return True


def varying(rows: Sequence[Row]) -> list[str]:
    """Override keys with more than one value; the policy when nothing varies. Parts of the policy's value are not keys
    of their own."""
    keys = list(dict.fromkeys(key for row in rows for key in row.overrides))
    if any(row.policy_key in keys for row in rows):
        keys = [key for key in keys if not any(key in row.policy_parts for row in rows)]
    found = [key for key in keys if len({(key in row.overrides, row.value_text(key)) for row in rows}) > 1]
    return found or [key for key in keys if any(key == row.policy_key for row in rows)]


def unit_of(rows: Sequence[Row]) -> tuple[str, int]:
    """(name, bytes) of the unit for the bytes of these rows: the largest of which every row has a tenth."""
    return column_unit(min((row.allocated_bytes for row in rows if row.allocated_bytes), default=0))


def label(row: Row, keys: Sequence[str]) -> str:
    """What distinguishes a row from the others: "full, seq_len=4096"."""
    parts = []
    for key in (key for key in keys if key in row.overrides):
        name = "" if key in (row.policy_key, CONFIG, TARGET) else f"{key.rpartition('.')[2]}="
        parts.append(name + row.value_text(key))
    return ", ".join(parts) or "as configured"


def mark_pareto(rows: Sequence[Row]) -> list[Row]:
    """The rows with `pareto` set: no other of the same workload is as good in both bytes and cost and better in one.
    Rows that exceed their limit are not candidates.

    The cost is that of `cost_of` the workload.
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        if row.ok and row.fits is not False and row.allocated_bytes is not None:
            groups.setdefault(workload(row), []).append(row)
    optimal = set()
    for group in groups.values():
        optimal |= _pareto_optimal(group)
    return [dataclasses.replace(row, pareto=id(row) in optimal) for row in rows]


def _pareto_optimal(rows: Sequence[Row]) -> set[int]:
    """`id` of the Pareto-optimal rows of one workload: from the smallest up, each that is faster than all before it."""
    _, cost = cost_of(rows)
    out: set[int] = set()
    least, last = math.inf, None
    for row in sorted(rows, key=lambda row: (row.allocated_bytes, cost(row))):
        point = row.allocated_bytes, cost(row)
        if last is None or point == last or point[1] < least:
            out.add(id(row))
            least, last = min(least, point[1]), point
    return out


def best(rows: Sequence[Row]) -> Row | None:
    """Of the rows that fit, the one that is fastest: as measured, else as predicted, and of those that tie
    (`ranking.TIE`) the one that recomputes least, then takes least memory. Where nothing is known of time, the one that
    recomputes least, then the smallest.

    None where none fits, and for rows of several workloads: a larger model is not a better way to train a smaller one.
    `best_of_each` has those.
    """
    if len({workload(row) for row in rows}) > 1:
        return None
    fitting = [row for row in rows if row.ok and row.fits and row.allocated_bytes is not None]
    name, cost = cost_of(fitting)
    if name == PREDICTED:
        return ranking.preferred(fitting, cost, thrift)
    return min(fitting, key=lambda row: (cost(row), row.allocated_bytes), default=None)


def tied(rows: Sequence[Row], winner: Row) -> list[Row]:
    """The rows that fit and are predicted to be as fast as the best one, `winner`: ties, itself left out."""
    fitting = [
        row
        for row in rows
        if row.ok and row.fits and row.allocated_bytes is not None and workload(row) == workload(winner)
    ]
    name, cost = cost_of(fitting)
    return [row for row in ranking.ties(fitting, cost) if row is not winner] if name == PREDICTED else []


def why_slower(rows: Sequence[Row]) -> dict[str, str]:
    """Explains rows that recompute no more than the best row and are predicted to be slower all the same.

    Returns the label of such a row -> the term that costs it the most more seconds than the best row, for example
    "0.31 s slower than full: waiting for collectives 0.142 s instead of 0.021 s". Rows that do not fit are included.
    """
    winner = best(rows)
    if winner is None or not winner.predicted_by_term or winner.predicted_seconds is None:
        return {}
    keys = varying(rows)
    reasons = {}
    for row in rows:
        seconds, terms = row.predicted_seconds, row.predicted_by_term
        if row is winner or not seconds or not terms or workload(row) != workload(winner):
            continue
        recomputes_more = (row.recompute_flops_fraction or 0.0) > (winner.recompute_flops_fraction or 0.0) + 0.005
        if recomputes_more or seconds <= (1 + ranking.TIE) * winner.predicted_seconds:
            continue
        term = max(terms, key=lambda name: terms[name] - winner.predicted_by_term.get(name, 0.0))
        words = TERM_WORDS.get(term, term.replace("_", " "))
        reasons[label(row, keys)] = (
            f"{seconds - winner.predicted_seconds:.3g} s slower than {label(winner, keys)}: "
            f"{words} {terms[term]:.3g} s instead of {winner.predicted_by_term.get(term, 0.0):.3g} s"
        )
    return reasons


def thrift(row: Row) -> tuple[float, int, bool]:
    """Returns the sort key of rows that are predicted to be equally fast: less recomputation, in whole per cent of the
    model's FLOPs, then less device and host memory together, then a named policy."""
    return (
        round(row.recompute_flops_fraction or 0.0, 2),
        (row.allocated_bytes or 0) + (row.host_bytes or 0),
        not row.names_a_policy(),
    )


def best_of_each(rows: Sequence[Row]) -> list[Row]:
    """The best row of every workload, where one fits; only rows of one workload can be compared."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(workload(row), []).append(row)
    return [winner for group in groups.values() if (winner := best(group))]


def flags(row: Row) -> str:
    """What to add to a command to run this row, quoted for a shell. A run uses the devices that it finds, so the target
    is left out."""
    return shlex.join(row.flag(key, value) for key, value in row.overrides.items() if key != TARGET)


def to_json(
    rows: Sequence[Row],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    interrupted: bool = False,
    config: str = "",
    given: str = "",
) -> dict[str, Any]:
    """The comparison as JSON values; see the module for the keys."""
    rows = mark_pareto(rows)
    winner, tasks = best(rows), task_keys(rows)
    return {
        "rows": [dataclasses.asdict(row) for row in rows],
        "best": dataclasses.asdict(winner) | {"flags": flags(winner)} if winner else None,
        "best_of_each": [
            dataclasses.asdict(row) | {"flags": flags(row), "task": label(row, tasks) if tasks else ""}
            for row in best_of_each(rows)
        ],
        "config": config,
        "given": given,
        "target": dict(target),
        "versions": dict(versions),
        "interrupted": interrupted,
    }


def workload(row: Row) -> str:
    """Returns the overrides that change what a row computes (model, batch, target), in one string; rows with equal
    strings can be compared."""
    return repr(sorted((key, as_text(value)) for key, value in row.overrides.items() if not row.is_how(key)))


def task_keys(rows: Sequence[Row]) -> list[str]:
    """The varying keys that change what is computed."""
    return [key for key in varying(rows) if not rows[0].is_how(key)]


def cost_of(rows: Sequence[Row]) -> tuple[str, Callable[[Row], float]]:
    """(name, cost of a row) by which rows of one workload are ranked, infinite for a row of which it is not known.

    MEASURED: seconds per token, where any was measured; else PREDICTED: the same as predicted; else RECOMPUTED: the
    recomputed share of FLOPs.
    """
    if any(row.measured for row in rows):
        return MEASURED, lambda row: _per_token((row.measured or {}).get("tokens_per_s"))
    if any(row.predicted_tokens_per_s for row in rows):
        return PREDICTED, lambda row: _per_token(row.predicted_tokens_per_s)
    return RECOMPUTED, lambda row: math.inf if row.recompute_flops_fraction is None else row.recompute_flops_fraction


def _per_token(speed: float | None) -> float:
    return 1 / speed if speed else math.inf
