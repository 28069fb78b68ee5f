"""The interval of predicted seconds in which four of five measured runs are expected, from the errors of earlier runs.

`measured_ratios.csv` has the ratio predicted/measured seconds of every published run that has a prediction
(tests/bench/validation, whose intervals.py writes it). A new run resembles the runs of its kind (`Kind`) by other
publishers, not further repetitions by one publisher. So a family (all sources of one publisher) weighs as the root of
its number of programs, as in the fit of the constants (`fit_rates.py` there), and its programs weigh alike.

The interval is [seconds / h, seconds * h], where |log(predicted/measured)| is at most log(h) for 80 % of this weight.
This is split conformal prediction with groups, as pooled by Dunn, Wasserman and Ramdas 2018 (arXiv 1809.07441). Kinds
form a tree with all runs as its root. Each level divides the runs by one property: compiled or eager framework; the
predicted program or another one; with or without sends between devices; what limits the seconds. A kind with fewer than
four families takes log(h) of the nearest kind above that has four, and doubles it. It is also doubled for a chip whose
generation fewer than two families measured. These numbers and the factor two are assumptions.

The coverage, the fraction of runs within the interval, is measured without the runs' own family (`without`).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from bytescope.memory.devices.chips import CHIPS, base_name
from bytescope.memory.records.schedule_records import Loop, Start, Steps

# The fraction of runs that the interval is expected to contain.
NOMINAL = 0.8
# Minimum number of families whose errors determine an interval: with K families, the error of a new one is above all of
# theirs with a probability of 1/(K+1), which 1 - NOMINAL must reach (Lee, Barber and Willett 2023, arXiv 2306.06342).
_MIN_FAMILIES = 4
_MIN_FAMILIES_OF_CHIP = 2
# Factor of log(h) for a kind or a chip with fewer families. The factor h of a CPU, for which nobody published runs:
# products and copies measured with numpy differ from XLA's kernels on cores that several devices share.
_UNMEASURED = 2.0
_CPU = 2.0
# Minimum of h - 1. Equal runs differ by more (seconds.ranking).
_MIN_WIDTH = 0.02
# Difference of a sum of weights from the same sum without rounding.
_ROUNDING = 1e-9
# What limits the seconds of a run.
DEVICE, TRANSFERS, LAUNCHES = "device", "transfers", "launches"
# Transfers limit a run that waits for collectives for at least this fraction of its predicted seconds.
_WAITING = 0.15


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of a run, which decides how accurate its prediction is.

    Fields:
        eager: whether the host launches every kernel (eager PyTorch) instead of running a compiled program.
        other: whether the measured program is known to be another program than the predicted one, or its measured
            seconds are known to be unreliable.
        sends: whether the program sends values from device to device (collective-permute), as pipeline stages and ring
            attention do.
        limit: what limits the seconds: "device", "transfers" (waits for collectives take at least 15 % of the
            predicted seconds) or "launches" (the launches of kernels by the host).
    """

    eager: bool
    other: bool
    sends: bool
    limit: str

    def path(self) -> tuple[tuple[Any, ...], ...]:
        """Returns the kinds that contain this kind, from all runs to this kind itself, which is the last. Each is the
        values of the first fields; the first is ().
        """
        whole = (self.eager, self.other, self.sends, self.limit)
        return tuple(whole[:length] for length in range(len(whole) + 1))


@dataclasses.dataclass(frozen=True)
class MeasuredRatio:
    """A published run with the ratio of predicted to measured seconds.

    Fields:
        source: the short name of the publication.
        family: the publishers of the run. If the interval of a run is tested, all runs of its family are left out.
        chip: the chip of the run, such as "h100".
        kind: what the run has in common with others, such as a compiled program that the device limits.
        program: the name of the compiled program. All runs of a program together have the weight of one run.
        ratio: predicted divided by measured seconds.
    """

    source: str
    family: str
    chip: str
    kind: Kind
    program: str
    ratio: float


@functools.cache
def measured_ratios() -> tuple[MeasuredRatio, ...]:
    """Returns the ratios of the published runs, from measured_ratios.csv."""
    table = resources.files("bytescope.memory.seconds") / "measured_ratios.csv"
    return parse_ratios(table.read_text(encoding="utf-8"))


def parse_ratios(text: str) -> tuple[MeasuredRatio, ...]:
    """Reads the text of a table with the columns of measured_ratios.csv."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return tuple(
        MeasuredRatio(
            row["source"],
            row["family"],
            row["chip"],
            Kind(row["eager"] == "1", row["other"] == "1", row["sends"] == "1", row["limit"]),
            row["program"],
            float(row["ratio"]),
        )
        for row in rows
    )


def kind_of(
    steps: Steps, by_term: Mapping[str, float], *, eager: bool = False, other: bool = False, launches: bool = False
) -> Kind:
    """Returns the kind of a run with a predicted schedule.

    Args:
        steps: the schedule of the program.
        by_term: term of the prediction (`schedule_walk.TERMS`) -> seconds.
        eager: whether the measured framework launches every kernel from its host.
        other: whether the measured program is known to be another program.
        launches: whether the launches take longer than the device.
    """
    waits = by_term["collectives"] >= _WAITING * sum(by_term.values())
    return Kind(eager, other, has_sends(steps), LAUNCHES if launches else TRANSFERS if waits else DEVICE)


def has_sends(steps: Steps) -> bool:
    """Returns whether a schedule sends values from one device to another (collective-permute)."""
    for step in steps:
        if has_sends(step.steps) if isinstance(step, Loop) else isinstance(step, Start) and "permute" in step.kind:
            return True
    return False


def around(seconds: float, target: Mapping[str, Any], kind: Kind, without: str = "") -> tuple[float, float]:
    """Returns the interval (low, high) in which the measured seconds of four of five runs with this prediction are
    expected, from the published runs of the same kind, or of the nearest more general kind with enough publishers.

    Args:
        seconds: the predicted seconds.
        target: the JSON of the devices for which the seconds are predicted.
        kind: the kind of the run (`kind_of`).
        without: the family whose published runs are left out; "" to use all.
    """
    factor = half_width(_chip(target), kind, without)
    return seconds / factor, seconds * factor


@functools.lru_cache(maxsize=256)
def half_width(chip: str, kind: Kind, without: str = "") -> float:
    """Returns the factor h by which the interval [seconds / h, seconds * h] extends on both sides of a prediction.

    Args:
        chip: the name of the chip, such as "h100"; "cpu" for a CPU.
        kind, without: as for `around`.
    """
    if chip == "cpu":
        return _CPU
    runs = [run for run in measured_ratios() if run.family != without]
    path = kind.path()
    alike = [[run for run in runs if run.kind.path()[level] == node] for level, node in enumerate(path)]
    enough = [some for some in alike if len({run.family for run in some}) >= _MIN_FAMILIES]
    away = conformal_quantile(enough[-1])
    known = {run.family for run in runs if _generation(run.chip) == _generation(chip)}
    if enough[-1] is not alike[-1] or len(known) < _MIN_FAMILIES_OF_CHIP:
        away *= _UNMEASURED
    return math.exp(max(away, math.log1p(_MIN_WIDTH)))


def conformal_quantile(runs: Sequence[MeasuredRatio]) -> float:
    """Returns the least value of |log(predicted/measured)| up to which runs have 80 % (`NOMINAL`) of the weight.

    runs: at least one run.

    Raises ValueError without runs.
    """
    families: dict[str, list[MeasuredRatio]] = defaultdict(list)
    for run in runs:
        families[run.family].append(run)
    found: list[tuple[float, float]] = []
    for members in families.values():
        counts = Counter((run.source, run.program) for run in members)
        for run in members:
            found.append((abs(math.log(run.ratio)), 1 / math.sqrt(len(counts)) / counts[run.source, run.program]))
    wanted = NOMINAL * math.fsum(weight for _, weight in found)
    done = 0.0
    for away, weight in sorted(found):
        done += weight
        if done >= wanted * (1 - _ROUNDING):
            return away
    raise ValueError("there are no runs")


def _chip(target: Mapping[str, Any]) -> str:
    if target.get("platform") == "cpu":
        return "cpu"
    name = base_name(str(target.get("name", "")))
    kind = target.get("kind")
    return name if name in CHIPS else next((chip.name for chip in CHIPS.values() if chip.kind == kind), "")


def _generation(name: str) -> object:
    chip = CHIPS.get(name)
    return (chip.gpu.capability if chip.gpu else chip.name) if chip else name
