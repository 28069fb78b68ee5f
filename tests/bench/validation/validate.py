"""Compares predicted seconds and bytes with the runs that other projects measured and published.

    python tests/bench/validation/validate.py --set=playbook --gpus=8
    python tests/bench/validation/validate.py --set=jax --folder=DIR --json=jax.json

For each run, the config that comes nearest to it is compiled. An interrupted command continues from the folder.
Printed: the scores by cohort and source, or by model and number of GPUs, the runs within their interval, the worst
predictions, and the reasons why other runs are not compared. The JSON has every run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

import measured_rows
import validation_runs
from validation_result import ValidationResult, validate_rows
from validation_score import Score

from bytescope.memory.compare import row_cache
from bytescope.memory.seconds import rates
from bytescope.memory.view.progress_bar import progress
from bytescope.train.plan.config_factory import FACTORY

WORST = 10


def show(result: ValidationResult) -> None:
    print(f"{result.set}: {len(result.scored)} measured runs, {result.compiled} compiled now, {len(result.left)} left")
    for title, parts in (("cohort", result.cohorts), ("source", result.sources), ("model", result.groups)):
        show_scores(title, ((one.name, one.all, one.claimed) for one in parts))
    for one in result.coverage:
        if one.held is not None:
            print(f"{one.name:28.28} {one.rows:4} runs, {one.held:6.1%} within their interval")
    timed = [one for one in result.scored if one.ratio]
    for one in sorted(timed, key=lambda one: -abs(math.log(one.ratio or 1)))[:WORST]:
        known = one.row.differs or one.row.other_program or one.row.unreliable
        print(f"{one.ratio:5.2f} {one.row.model} on {one.row.gpus}, {one.row.setup}: {known or 'no reason is known'}")
    for reason, rows in result.unsaid:
        print(f"not compared, {len(rows)} runs: {reason}")


def show_scores(title: str, parts: Iterable[tuple[str, Score, Score]]) -> None:
    print(f"{title:28} runs  within  median  least   most | claimed  within  median | bytes, median")
    for name, every, claimed in parts:
        if every.rows or every.bytes_rows:
            level = (
                f"{every.within:7.1%} {every.median:7.2f} {every.least:6.2f} {every.most:6.2f}"
                if every.rows
                else " " * 29
            )
            ours = f"{claimed.within:7.1%} {claimed.median:7.2f}" if claimed.rows else " " * 15
            size = f"{every.bytes_median:6.2f}" if every.bytes_median else ""
            print(f"{name:28.28} {every.rows:4} {level} | {claimed.rows:7} {ours} | {size}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=measured_rows.SETS, default="playbook", help="set of published runs")
    parser.add_argument("--gpus", type=int, help="only runs on this number of GPUs")
    parser.add_argument("--only", default="", help="only runs whose model, chip, setup or source contains this text")
    parser.add_argument("--folder", type=Path, default=row_cache.folder().parent / "validate", help="compiled runs")
    parser.add_argument("--rates", type=Path, help="a file of bytescope calibrate")
    parser.add_argument("--jobs", type=int, help="number of programs compiled at the same time")
    parser.add_argument("--json", type=Path, help="file to write every run with its prediction to")
    args = parser.parse_args()
    if args.rates:
        rates.use(args.rates)
    rows = []
    for row in measured_rows.rows(args.set):
        named = f"{row.model} {row.chip} {row.setup} {row.source}".lower()
        if args.gpus in (None, row.gpus) and args.only.lower() in named:
            rows.append(row)
    with progress(None) as bar:
        runs = validation_runs.run(rows, FACTORY, args.folder, workers=args.jobs, progress=bar, expect=bar.expect)
    result = validate_rows(args.set, rows, runs)
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result.to_json()), encoding="utf-8")


if __name__ == "__main__":
    main()
