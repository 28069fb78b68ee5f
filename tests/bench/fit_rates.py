"""Fits the constants of a step's seconds (memory/seconds/constants.py) to measured runs, and says how far they carry.

    bytescope validate --set=jax --out=DIR               # compiles the rows once; resumable
    python tests/bench/fit_rates.py --folder=DIR          # no compile: a minute

The five constants minimize the logarithms of predicted/measured seconds: as squares up to 10 % and as they are beyond,
so that one odd row does not pull; every source weighs as the root of its rows, and a constant that is 0.3 away from 1
costs as much as a row that is 8 % away. Rows are those of the set `jax` of quality A and of the newest vintage of their
source. Printed: the constants, predicted/measured of every row with and without them, the share within 0.85 to
1.15, the median, and the same of each source with constants that were fitted without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.devices import targets
from bytescope.memory.plan import cache
from bytescope.memory.report_records import schedule
from bytescope.memory.seconds import constants, rates
from bytescope.memory.seconds.rate_records import Rates
from bytescope.memory.seconds.walk import walk
from bytescope.memory.validation import runs, sets
from bytescope.memory.validation.rows import Row

# Constant -> what it is without a fit, the least and most it may become, and the deviation that costs PRIOR. Memory is
# never faster than a data sheet says (copies reach 0.85 to 0.9 of it), and collectives never faster than alone.
CONSTANTS = {"PRODUCTS": (1.0, 0.8, 1.5, 0.3), "MEMORY": (1.0, 0.87, 1.5, 0.3), "ATTENTION": (1.0, 0.7, 1.5, 0.3),
             "COLLECTIVES": (1.0, 1.0, 2.0, 0.3), "SLOWDOWN": (0.1, 0.0, 0.5, 0.1)}
PRIOR = 0.03  # of one constant that is away by its deviation
HALF_SQUARE = 0.1  # of a logarithm: squares below, straight above
WITHIN = (0.85, 1.15)
OLDER = ("pax_2023-08", "pax_2023-07-oldest", "dgxc_l2_70b_old")

Constants = tuple[float, ...]
USUAL: Constants = tuple(row[0] for row in CONSTANTS.values())


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row with its schedule, the rates of its chip and how many calls of the step it holds."""

    row: Row
    steps: schedule.Steps
    rates: Rates
    calls: int

    @property
    def source(self) -> str:
        return self.row.source.partition(":")[0]

    @property
    def fitted(self) -> bool:
        return self.row.quality == "A" and self.source not in OLDER

    def ratio(self, values: Constants) -> float:
        """Predicted over measured seconds with these constants."""
        for name, value in zip(CONSTANTS, values, strict=True):
            setattr(constants, name, value)
        return self.calls * walk(self.steps, self.rates).seconds / self.row.measured_seconds


def loss(values: Constants, rows: Iterable[Measured]) -> float:
    """What a fit makes small; infinite outside the bounds."""
    if not all(low <= value <= high for value, (_, low, high, _) in zip(values, CONSTANTS.values(), strict=True)):
        return math.inf
    by_source: dict[str, list[float]] = {}
    for one in rows:
        by_source.setdefault(one.source, []).append(_cost(abs(math.log(one.ratio(values)))))
    rest = sum(((value - usual) / deviation) ** 2
               for value, (usual, _, _, deviation) in zip(values, CONSTANTS.values(), strict=True))
    return sum(math.sqrt(len(costs)) * statistics.mean(costs) for costs in by_source.values()) + PRIOR * rest


def _cost(away: float) -> float:
    return away * away / (2 * HALF_SQUARE) if away < HALF_SQUARE else away - HALF_SQUARE / 2


def fit(rows: Sequence[Measured], start: Constants = USUAL) -> Constants:
    """The constants of the least loss, by steps along each that halve where none is better."""
    best, least, width = start, loss(start, rows), 0.1
    while width > 0.004:
        tries = ((*best[:at], best[at] + sign * width * CONSTANTS[name][3], *best[at + 1:])
                 for (at, name), sign in itertools.product(enumerate(CONSTANTS), (1, -1)))
        better = min(((loss(values, rows), values) for values in tries), default=(math.inf, best))
        if better[0] < least - 1e-9:
            least, best = better
        else:
            width /= 2
    return tuple(round(value, 3) for value in best)


def summary(ratios: Sequence[float]) -> str:
    inside = sum(WITHIN[0] <= ratio <= WITHIN[1] for ratio in ratios)
    return f"{inside} of {len(ratios)} within {WITHIN[0]} to {WITHIN[1]}, median {statistics.median(ratios):.3f}"


def measured(rows: Sequence[Row], answers: Mapping[str, Mapping[str, Any]]) -> list[Measured]:
    """The rows that have a time and a compiled program on a chip whose rates are known."""
    found = []
    for row in rows:
        answer = answers.get(row.id)
        if answer and row.measured_seconds and answer.get("schedule"):
            reached = rates.of(targets.parse(row.target))
            if reached:
                found.append(Measured(row, schedule.from_json(answer["schedule"]), reached,
                                      row.calls * int(answer.get("calls_per_update") or 1)))
    return found


def report(rows: Sequence[Measured]) -> Iterable[str]:
    """The lines of the report."""
    chosen = [one for one in rows if one.fitted]
    best = fit(chosen)
    shown = ", ".join(f"{name} {value}" for name, value in zip(CONSTANTS, best, strict=True))
    yield f"fitted on {len(chosen)} rows: {shown}"
    yield f"{'row':>4}  {'source':20} {'model':16} {'target':14} {'measured s':>10} {'before':>7} {'fitted':>7}"
    for one in rows:
        mark = " *" if one.fitted else ""
        yield (f"{one.row.id:>4}  {one.source:20} {one.row.model:16} {one.row.target:14} "
               f"{one.row.measured_seconds:10.3f} {one.ratio(USUAL):7.2f} {one.ratio(best):7.2f}{mark}")
    newest = [one for one in rows if one.row.quality == "A" and one.source not in OLDER]
    yield f"quality A, newest, before: {summary([one.ratio(USUAL) for one in newest])}"
    yield f"quality A, newest, fitted: {summary([one.ratio(best) for one in newest])}"
    for source in dict.fromkeys(one.source for one in chosen):
        values = fit([one for one in chosen if one.source != source], best)
        yield f"without {source}: {summary([one.ratio(values) for one in newest if one.source == source])}; {values}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="what `bytescope validate` wrote")
    folder = parser.parse_args().folder
    from bytescope.train.planning.adapter import Adapter

    rows = sets.rows("jax")
    jobs, _ = runs.jobs_of(rows, Adapter())
    answers = {key: answer for key, job in jobs.items() if (answer := cache.read(folder, job.name))}
    found = measured(rows, answers)
    if not any(one.fitted for one in found):
        raise SystemExit(f"{folder}: no compiled rows of this version: run bytescope validate --set=jax first")
    for line in report(found):
        print(line)


if __name__ == "__main__":
    main()
