"""Prints how often the intervals of predicted seconds contain a measured run; with --folder, writes the ratios first.

    python tests/bench/validation/intervals.py                  # from the committed ratios; compiles nothing
    python tests/bench/validation/intervals.py --folder=DIR     # compiles all programs (hours on two cores; resumable)

The ratios predicted/measured are in memory/seconds/measured_ratios.csv, from which the intervals are built, and, for
runs whose measured seconds are known to be unreliable, in unreliable_ratios.csv. The coverage of a source is measured
with intervals from other publishers' runs only. A run without a prediction counts as missed. `width` is the median of
the upper end of an interval divided by its lower end.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import measured_rows
import validation_result
import validation_runs
from validation_score import ScoredRun

from bytescope.memory.seconds import intervals
from bytescope.memory.seconds.intervals import MeasuredRatio
from bytescope.train.plan.config_factory import FACTORY

RELIABLE = Path(intervals.__file__).with_name("measured_ratios.csv")
UNRELIABLE = Path(__file__).with_name("unreliable_ratios.csv")
COLUMNS = ("source", "family", "chip", "eager", "other", "sends", "limit", "program", "ratio")


def predict(folder: Path) -> list[ScoredRun]:
    """Compiles the programs of all published runs that have no record in `folder`, and returns the predicted runs."""
    scored: list[ScoredRun] = []
    for name in measured_rows.SETS:
        rows = measured_rows.rows(name)
        scored += validation_result.validate_rows(name, rows, validation_runs.run(rows, FACTORY, folder)).scored
    return [one for one in scored if one.row.counts and one.ratio and one.kind]


def write(scored: Sequence[ScoredRun], path: Path) -> None:
    """Writes the ratios of predicted runs, sorted by source and program."""
    rows = []
    for one in scored:
        kind = one.kind
        rows.append(
            {
                "source": one.row.source_id,
                "family": one.row.family,
                "chip": one.row.chip,
                "eager": int(kind.eager),
                "other": int(kind.other),
                "sends": int(kind.sends),
                "limit": kind.limit,
                "program": one.program.split("-")[1][:8],
                "ratio": f"{one.ratio:.4g}",
            }
        )
    rows.sort(key=lambda row: tuple(str(row[name]) for name in COLUMNS))
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


def line(name: str, published: str, rows: int, runs: Sequence[MeasuredRatio]) -> str:
    """Returns the coverage of sources with this number of measured rows, of which `runs` have a prediction."""
    factors = [intervals.half_width(run.chip, run.kind, run.family) for run in runs]
    inside = [abs(math.log(run.ratio)) <= math.log(factor) for run, factor in zip(runs, factors, strict=True)]
    claimed = [held for run, held in zip(runs, inside, strict=True) if not run.kind.other]
    width = statistics.median(factor**2 for factor in factors) if factors else math.nan
    claimed_held = statistics.fmean(claimed) if claimed else math.nan
    return (
        f"{name:22} {published:9} {rows:5} {rows - len(runs):14}  {sum(inside) / rows:6.1%}"
        f"  {len(claimed):7}  {claimed_held:6.1%}  {width:5.2f}"
    )


def main() -> None:
    """Writes the ratios if a folder is given, and prints the coverage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="compile what has no record in this folder, and write both tables")
    args = parser.parse_args()
    if args.folder:
        scored = predict(args.folder)
        write([one for one in scored if not one.row.unreliable], RELIABLE)
        write([one for one in scored if one.row.unreliable], UNRELIABLE)
        intervals.measured_ratios.cache_clear()
        intervals.half_width.cache_clear()
    ratios = [run for path in (RELIABLE, UNRELIABLE) for run in intervals.parse_ratios(path.read_text("utf-8"))]
    rows = [row for name in measured_rows.SETS for row in measured_rows.rows(name) if row.counts]
    published = {row.source_id: row.published for row in rows}
    held_out = {fact["source_id"] for fact in measured_rows.facts("held_out")}
    groups = {name: {name} for name in sorted(published, key=lambda name: published[name], reverse=True)}
    groups |= {"held-out sources": held_out, "other sources": published.keys() - held_out}
    print("source                 published  rows  not predicted  within  claimed  within  width")
    for name, sources in groups.items():
        count = sum(row.source_id in sources for row in rows)
        print(line(name, published.get(name, ""), count, [run for run in ratios if run.source in sources]))


if __name__ == "__main__":
    main()
