"""The interval of predicted seconds in which four of five measured runs are expected, from the ratios of earlier runs.

`measured_ratios.csv` has the ratio predicted/measured seconds of every published run that has a prediction
(`bytescope validate`); tests/bench/intervals.py writes it. A new run resembles the runs of its kind (`Kind`) in other
publications, not further repetitions of one publication. So every publisher of runs (a family) has the same weight,
whatever its number of runs, and programs have equal weights within a family.

Kinds form a tree: all runs, then the runs of compiled or of eager frameworks, then those with or without sends between
devices, then those with the same limit. The distribution of a kind is a mixture. With K families of its own, their runs
have the weight K/(K+1), as the new run is from one of K+1 families. The weight 1/(K+1) goes to the families that have
runs only of the kind above, whose distribution is made twice as wide, because they are of another kind. A kind without
runs has this wider distribution alone. This pools the distributions of groups as in Dunn, Wasserman and Ramdas 2018
(arXiv 1809.07441), with the correction for a small number of groups of Lee, Barber and Willett 2023 (arXiv 2306.06342).
A chip whose generation was not measured makes the distribution twice as wide again. Above all runs, a ratio is
log-uniform between 1/3 and 3, an assumption. The ends of the interval are the quantiles at 10 % and 90 %, so its width
is never zero.

The coverage, the fraction of runs within the interval, is measured without the runs' own family (`without`).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from bytescope.memory.devices.chips import CHIPS, base_name
from bytescope.memory.seconds.step_schedule import Loop, Start, Steps

# The fraction of runs that the interval is expected to contain.
NOMINAL = 0.8
# Ratios on both sides of 1 between which a run of which nothing is known is expected, log-uniformly: an assumption.
_UNKNOWN = 3.0
_UNKNOWN_POINTS = 20
# How much wider the distribution of a kind or a chip without measured runs is than that of the kind above.
_UNMEASURED = 2.0
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
        sends: whether the program sends values from device to device (collective-permute), as pipeline stages and ring
            attention do.
        limit: what limits the seconds: "device", "transfers" (waits for collectives take at least 15 % of the
            predicted seconds) or "launches" (the launches of kernels by the host).
    """

    eager: bool
    sends: bool
    limit: str

    def path(self) -> tuple[tuple[Any, ...], ...]:
        """Returns the kinds of runs above this one and this one, from all runs to the same kind."""
        return (), (self.eager,), (self.eager, self.sends), (self.eager, self.sends, self.limit)


@dataclasses.dataclass(frozen=True)
class MeasuredRatio:
    """A published run with the ratio of predicted to measured seconds.

    Fields:
        source: the short name of the publication.
        family: the publishers of the run. All runs of a family are left out together.
        chip: the chip of the run, such as "h100".
        kind: the kind of the run.
        program: the name of the compiled program. Runs of one program share its weight.
        ratio: predicted divided by measured seconds.
    """

    source: str
    family: str
    chip: str
    kind: Kind
    program: str
    ratio: float


# (logarithm of predicted/measured seconds, weight), in any order; the weights add up to 1.
Distribution = Sequence[tuple[float, float]]


@functools.cache
def measured_ratios() -> tuple[MeasuredRatio, ...]:
    """Returns the ratios of the published runs, from measured_ratios.csv."""
    table = resources.files("bytescope.memory.seconds") / "measured_ratios.csv"
    rows = csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"), newline=""))
    return tuple(
        MeasuredRatio(
            row["source"],
            row["family"],
            row["chip"],
            Kind(row["eager"] == "1", row["sends"] == "1", row["limit"]),
            row["program"],
            float(row["ratio"]),
        )
        for row in rows
    )


def kind_of(steps: Steps, by_term: Mapping[str, float], *, eager: bool = False, launches: bool = False) -> Kind:
    """Returns the kind of a run with a predicted schedule.

    Args:
        steps: the schedule of the program.
        by_term: term of the prediction (`schedule_walk.TERMS`) -> seconds.
        eager: whether the measured framework launches every kernel from its host.
        launches: whether these launches take longer than the device.
    """
    waits = by_term["collectives"] >= _WAITING * sum(by_term.values())
    return Kind(eager, has_sends(steps), LAUNCHES if launches else TRANSFERS if waits else DEVICE)


def has_sends(steps: Steps) -> bool:
    """Returns whether a schedule sends values from one device to another (collective-permute)."""
    for step in steps:
        if has_sends(step.steps) if isinstance(step, Loop) else isinstance(step, Start) and "permute" in step.kind:
            return True
    return False


def around(seconds: float, target: Mapping[str, Any], kind: Kind, without: str = "") -> tuple[float, float]:
    """Returns the interval (low, high) of measured seconds in which four of five runs are expected for a prediction.

    Args:
        seconds: the predicted seconds.
        target: the JSON of the target.
        kind: the kind of the run.
        without: the family whose runs are not used; "" to use all.
    """
    low, high = _ends(_chip(target), kind, without)
    return seconds / high, seconds / low


@functools.lru_cache(maxsize=256)
def _ends(chip: str, kind: Kind, without: str) -> tuple[float, float]:
    found = distribution(chip, kind, without)
    return math.exp(quantile(found, (1 - NOMINAL) / 2)), math.exp(quantile(found, (1 + NOMINAL) / 2))


def distribution(chip: str, kind: Kind, without: str = "") -> Distribution:
    """Returns the distribution of log(predicted/measured seconds) that is expected for a run.

    Args:
        chip: the name of the chip, or "cpu", for which no published run is used.
        kind, without: as for `around`.
    """
    runs = [run for run in measured_ratios() if run.family != without and chip != "cpu"]
    levels: list[list[MeasuredRatio]] = []  # of this kind, then of the kinds above
    seen: set[str] = set()
    for level, node in reversed(list(enumerate(kind.path()))):
        new = [run for run in runs if run.kind.path()[level] == node and run.family not in seen]
        levels.append(new)
        seen.update(run.family for run in new)
    found, first = _unknown(), True
    for number, new in reversed(list(enumerate(levels))):
        if not first and (new or not number):
            found = _widened(found)
        if new:
            found, first = _mixed(new, found), False
    if runs and _generation(chip) not in {_generation(run.chip) for run in runs}:
        found = _widened(found)
    return found


def _unknown() -> Distribution:
    width = 2 * math.log(_UNKNOWN) / _UNKNOWN_POINTS
    return [((number + 0.5) * width - math.log(_UNKNOWN), 1 / _UNKNOWN_POINTS) for number in range(_UNKNOWN_POINTS)]


def _mixed(runs: Sequence[MeasuredRatio], above: Distribution) -> Distribution:
    families: dict[str, list[MeasuredRatio]] = defaultdict(list)
    for run in runs:
        families[run.family].append(run)
    part = 1 / (len(families) + 1)
    found = _times(above, part)
    for members in families.values():
        programs = [(run.source, run.program) for run in members]
        share = {program: part / len(set(programs)) / programs.count(program) for program in set(programs)}
        found += [(math.log(run.ratio), share[program]) for run, program in zip(members, programs, strict=True)]
    return found


def _widened(found: Distribution) -> Distribution:
    middle = quantile(found, 0.5)
    return [(middle + _UNMEASURED * (value - middle), weight) for value, weight in found]


def _times(found: Iterable[tuple[float, float]], part: float) -> list[tuple[float, float]]:
    return [(value, weight * part) for value, weight in found]


def quantile(found: Distribution, at: float) -> float:
    """Returns the quantile of a weighted distribution: the least value up to which at least the weight `at` lies, or,
    for a quantile below one half, the greatest value from which at least the weight 1 - `at` lies."""
    upper = at >= 0.5
    wanted, done = at if upper else 1 - at, 0.0
    ordered = sorted(found, reverse=not upper)
    for value, weight in ordered:
        done += weight
        if done >= wanted - _ROUNDING:
            return value
    return ordered[-1][0]


def _chip(target: Mapping[str, Any]) -> str:
    if target.get("platform") == "cpu":
        return "cpu"
    name = base_name(str(target.get("name", "")))
    kind = target.get("kind")
    return name if name in CHIPS else next((chip.name for chip in CHIPS.values() if chip.kind == kind), "")


def _generation(name: str) -> object:
    chip = CHIPS.get(name)
    return (chip.gpu.capability if chip.gpu else chip.name) if chip else name
