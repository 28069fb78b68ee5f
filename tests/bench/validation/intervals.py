"""Writes memory/seconds/measured_ratios.csv, and prints how often the intervals built from it contain a measured run.

    cd tests/bench/validation
    for set in playbook jax torch; do python validate.py --set=$set --folder=DIR; done    # compiles; resumable
    python intervals.py --folder=DIR                                                      # no compile

The coverage of a source is measured with intervals from other publishers' runs only. A run without a prediction counts
as missed. The last columns have the intervals that were used until 2026-11-27 (quantiles of 8 to 12 programs per
generation of chips), for the same rows.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from pathlib import Path

import measured_rows
import validation_result
import validation_runs
from coverage import Coverage, by_source
from validation_score import ScoredRun

from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.seconds import intervals
from bytescope.train.plan.config_factory import FACTORY

TABLE = Path(intervals.__file__).parent / "measured_ratios.csv"
COLUMNS = ("source", "family", "chip", "eager", "other", "sends", "limit", "program", "ratio")
# Compute capability -> the quantiles of predicted/measured seconds that were used until 2026-11-27.
BEFORE = {(7, 0): (0.983, 1.136), (8, 0): (0.875, 1.093), (9, 0): (0.857, 1.015)}
BEFORE_ASSUMED = (0.72, 1.19)


def score(name: str, folder: Path) -> tuple[list[ScoredRun], list[measured_rows.MeasuredRow]]:
    """Returns the predicted runs of a set from the finished records in `folder`, and the runs without a prediction."""
    rows = measured_rows.rows(name)
    programs, answers = validation_runs.finished(rows, FACTORY, folder)
    runs = validation_runs.Runs(answers, {}, programs=programs)
    result = validation_result.validate_rows(name, rows, runs)
    known = {one.row.id for one in result.scored}
    return list(result.scored), [row for row in rows if row.id not in known]


def before(one: ScoredRun) -> tuple[float, float]:
    """Returns the interval of a run as it was until 2026-11-27."""
    gpu = CHIPS[one.row.chip].gpu
    low, high = BEFORE.get(gpu.capability, BEFORE_ASSUMED) if gpu else BEFORE_ASSUMED
    return max(one.device_seconds / high, one.row.launch_seconds), max(one.device_seconds / low, one.row.launch_seconds)


def write(scored: list[ScoredRun]) -> None:
    """Writes the ratios of the runs that count and whose seconds are reliable, sorted by source and program."""
    rows = []
    for one in scored:
        if one.row.counts and one.ratio and one.kind and not one.row.unreliable:
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
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
    intervals.measured_ratios.cache_clear()
    intervals.half_width.cache_clear()


def show(coverages: list[Coverage], scored: list[ScoredRun]) -> None:
    """Prints a line of each source."""
    print("source                 published  rows refused  within  claimed  within  width   before: within  width")
    for each in coverages:
        some = [one for one in scored if one.row.counts and each.name in ("all", one.row.source_id)]
        ends = [before(one) for one in some]
        held = sum(low <= (one.row.measured_seconds or 0) <= high for one, (low, high) in zip(some, ends, strict=True))
        width = statistics.median(high / low for low, high in ends) if ends else math.nan
        print(
            f"{each.name:22} {each.published:9} {each.rows:5} {each.refused:7}  {each.held or 0:6.1%}  "
            f"{each.claimed_rows:7}  {each.claimed_held or 0:6.1%}  {each.width or math.nan:5.2f}"
            f"   {held / each.rows if each.rows else 0:14.1%}  {width:5.2f}"
        )


def main() -> None:
    """Writes the table, unless --check is given, and prints the coverage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder of validate.py --folder")
    parser.add_argument("--check", action="store_true", help="do not write the table")
    args = parser.parse_args()
    sets = {name: score(name, args.folder) for name in measured_rows.SETS}
    if not args.check:
        write([one for scored, _ in sets.values() for one in scored])
        sets = {name: score(name, args.folder) for name in measured_rows.SETS}
    everyone = [one for scored, _ in sets.values() for one in scored]
    refused = [row for _, missing in sets.values() for row in missing]
    show(by_source(everyone, refused), everyone)
    held_out = {fact["source_id"] for fact in measured_rows.facts("held_out")}
    print(f"\nheld-out sources: {', '.join(sorted(held_out))}")
    some = [one for one in everyone if one.row.source_id in held_out]
    show(by_source(some, [row for row in refused if row.source_id in held_out])[:1], some)


if __name__ == "__main__":
    main()
