"""Fits the constants of a step's seconds (memory/seconds/constants.py) to measured runs, and says how far they carry.

    cd tests/bench/validation
    python validate.py --set=jax --folder=DIR             # compiles the rows once; resumable
    python fit_rates.py --folder=DIR                      # no compile: a minute

The five constants minimize the logarithms of predicted/measured seconds: as squares up to 10 % and as they are beyond,
so that one odd row does not pull; every source weighs as the root of its programs, rows that are one program of ours
weigh one together, and a constant that is 0.3 away from 1 costs as much as a row that is 8 % away. Rows are those of
the set `jax` of quality A and of the newest vintage of their source. Printed: the constants, predicted/measured of
every row with and without them, the share within 0.85 to 1.15 and the median, quantiles by generation of chip
(memory/seconds/constants.py), and the scores of each source with constants that were fitted without it.
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

import measured_rows
import validation_runs
import validation_score
from measured_rows import MeasuredRow

from bytescope.memory.devices import targets
from bytescope.memory.records import schedule_records
from bytescope.memory.seconds import constants, rates
from bytescope.memory.seconds.rate_records import DeviceRates
from bytescope.memory.seconds.schedule_walk import walk

# Constant -> what it is without a fit, the least and most it may become, and the deviation that costs PRIOR. Memory is
# never faster than a data sheet says (copies reach 0.85 to 0.9 of it), and collectives never faster than alone.
CONSTANTS = {
    "PRODUCTS": (1.0, 0.8, 1.5, 0.3),
    "MEMORY": (1.0, 0.87, 1.5, 0.3),
    "ATTENTION": (1.0, 0.7, 1.5, 0.3),
    "COLLECTIVES": (1.0, 1.0, 2.0, 0.3),
    "SLOWDOWN": (0.1, 0.0, 0.5, 0.1),
}
PRIOR = 0.03  # of one constant that is away by its deviation
HALF_SQUARE = 0.1  # of a logarithm: squares below, straight above
NEWEST = "A, newest"  # the cohort that is fitted and scored
GENERATIONS = (("a100-80g",), ("h100", "h200"), ("a100-80g", "h100", "h200"), ("v100",))

Constants = tuple[float, ...]
USUAL: Constants = tuple(row[0] for row in CONSTANTS.values())
NOW: Constants = tuple(getattr(constants, name) for name in CONSTANTS)  # before a fit sets them


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row with its schedule, the rates of its chip and how many calls of the step it holds."""

    row: MeasuredRow
    steps: schedule_records.Steps
    rates: DeviceRates
    calls: int
    program: str

    @property
    def source(self) -> str:
        return self.row.source_id

    @property
    def fitted(self) -> bool:
        return self.row.cohort == NEWEST and self.row.claims_seconds

    def ratio(self, values: Constants) -> float:
        """Predicted over measured seconds with these constants."""
        for name, value in zip(CONSTANTS, values, strict=True):
            setattr(constants, name, value)
        return self.calls * walk(self.steps, self.rates).seconds / self.row.measured_seconds


def loss(values: Constants, rows: Iterable[Measured]) -> float:
    """What a fit makes small; infinite outside the bounds."""
    if not all(low <= value <= high for value, (_, low, high, _) in zip(values, CONSTANTS.values(), strict=True)):
        return math.inf
    by_source: dict[str, dict[str, list[float]]] = {}
    for one in rows:
        costs = by_source.setdefault(one.source, {}).setdefault(one.program, [])
        costs.append(_cost(abs(math.log(one.ratio(values)))))
    rest = sum(
        ((value - usual) / deviation) ** 2
        for value, (usual, _, _, deviation) in zip(values, CONSTANTS.values(), strict=True)
    )
    away = (
        math.sqrt(len(programs)) * statistics.mean(map(statistics.mean, programs.values()))
        for programs in by_source.values()
    )
    return sum(away) + PRIOR * rest


def _cost(away: float) -> float:
    return away * away / (2 * HALF_SQUARE) if away < HALF_SQUARE else away - HALF_SQUARE / 2


def fit(rows: Sequence[Measured], start: Constants = USUAL) -> Constants:
    """The constants of the least loss, by steps along each that halve where none is better."""
    best, least, width = start, loss(start, rows), 0.1
    while width > 0.004:
        tries = (
            (*best[:at], best[at] + sign * width * CONSTANTS[name][3], *best[at + 1 :])
            for (at, name), sign in itertools.product(enumerate(CONSTANTS), (1, -1))
        )
        better = min(((loss(values, rows), values) for values in tries), default=(math.inf, best))
        if better[0] < least - 1e-9:
            least, best = better
        else:
            width /= 2
    return tuple(round(value, 3) for value in best)


def summary(rows: Sequence[Measured], values: Constants) -> str:
    """The share within bounds and the median, each program of weight one."""
    pairs = [(one.program, one.ratio(values)) for one in rows]
    return (
        f"{len(pairs)} rows, {len(dict(pairs))} programs: "
        f"{validation_score.share_within(pairs, validation_score.WITHIN):.1%} within "
        f"{validation_score.WITHIN[0]} to {validation_score.WITHIN[1]}, median {validation_score.median(pairs):.3f}"
    )


def quantiles(pairs: Sequence[tuple[str, float]]) -> str:
    """Quantiles of (program, ratio), as memory/seconds/constants.py has them."""
    quantile = validation_score.quantile
    found = ", ".join(f"{at:.0%} {quantile(pairs, at):.3f}" for at in (0.1, 0.5, 0.9)) if pairs else "none"
    return f"{found} ({len(pairs)} rows, {len(dict(pairs))} programs)"


def measured(
    rows: Sequence[MeasuredRow], answers: Mapping[str, Mapping[str, Any]], programs: Mapping[str, str]
) -> list[Measured]:
    """The rows that have a time and a compiled program on a chip whose rates are known; `programs` names each
    one's."""
    found = []
    for row in rows:
        answer = answers.get(row.id)
        if answer and row.measured_seconds and answer.get("schedule"):
            reached = rates.select(targets.parse(row.target))
            if reached:
                found.append(
                    Measured(
                        row,
                        schedule_records.from_json(answer["schedule"]),
                        reached,
                        int(answer.get("calls_per_update") or 1),
                        programs[row.id],
                    )
                )
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
        yield (
            f"{one.row.id:>4}  {one.source:20} {one.row.model:16} {one.row.target:14} "
            f"{one.row.measured_seconds:10.3f} {one.ratio(USUAL):7.2f} {one.ratio(best):7.2f}{mark}"
        )
    newest = [one for one in rows if one.fitted]
    for name, values in (("before", USUAL), ("now", NOW), ("fitted", best)):
        yield f"{NEWEST}, {name}: {summary(newest, values)}"
        yield f"  without V100: {summary([one for one in newest if one.row.chip != 'v100'], values)}"
    left_out: list[tuple[Measured, float]] = []
    for source in dict.fromkeys(one.source for one in chosen):
        values = fit([one for one in chosen if one.source != source], best)
        alone = [one for one in newest if one.source == source]
        left_out += [(one, one.ratio(values)) for one in alone]
        yield f"without {source}: {summary(alone, values)}; {values}"
    for chips in GENERATIONS:
        among = [one for one in newest if one.row.chip in chips]
        yield f"{', '.join(chips)}, now: {quantiles([(one.program, one.ratio(NOW)) for one in among])}"
        yield f"  each with its source left out: {quantiles([(one.program, r) for one, r in left_out if one in among])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder of validate.py --folder")
    folder = parser.parse_args().folder
    from bytescope.train.plan.config_factory import FACTORY

    rows = measured_rows.rows("jax")
    programs, answers = validation_runs.finished(rows, FACTORY, folder)
    found = measured(rows, answers, programs)
    if not any(one.fitted for one in found):
        raise SystemExit(f"{folder}: no compiled rows of this version: run validate.py --set=jax first")
    for line in report(found):
        print(line)


if __name__ == "__main__":
    main()
