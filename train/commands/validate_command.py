"""bytescope validate: compares predicted seconds and bytes with published measurements on real GPUs, or with the user's
own runs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bytescope.memory.commands.arguments import (
    INTERRUPTED,
    add_json,
    add_rates,
    check_files,
    check_rates,
    user_path,
    write,
)
from bytescope.memory.commands.json_output import predicted_caveat, write_json
from bytescope.memory.compare import row_cache
from bytescope.memory.errors import ReportError
from bytescope.memory.view.progress_bar import progress
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.plan.validation import measured_rows, own_runs
from bytescope.train.plan.validation.measured_rows import SETS, MeasuredRow
from bytescope.train.plan.validation.validation_result import ValidationResult
from bytescope.train.run import run_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope validate` to the parser."""
    listed = "; ".join(f"{name}: {what}" for name, what in SETS.items())
    parser.add_argument(
        "--set",
        choices=SETS,
        metavar="NAME",
        help=f"set of published runs to compare with (default: playbook). {listed}",
    )
    parser.add_argument(
        "--runs",
        metavar="FILE|DIR",
        help="compare with your own runs: a CSV file, run directories of bytescope train, or a folder of them; several "
        f"with commas. Columns of the file: {', '.join(own_runs.COLUMNS)} and config keys such as model.n_layers",
    )
    parser.add_argument(
        "--template", metavar="FILE", type=user_path, help="write an example of a CSV file for --runs, and exit"
    )
    parser.add_argument(
        "--gpus", metavar="N,N", help="use only runs on these numbers of GPUs, such as 8,32 (default: all runs)"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="use only runs whose model, chip or setup contains TEXT, such as tp4 (default: all runs)",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        type=user_path,
        help="folder to store compiled runs in, from which an interrupted command resumes (default: a folder in the "
        "cache)",
    )
    add_rates(parser)
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="number of programs compiled at the same time (default: one per core, within 20 GiB of host memory)",
    )
    add_json(parser, "each measured run, its prediction and the scores")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=user_path,
        help="write each measured run, its prediction and the scores as a page that opens offline",
    )


def run(args: argparse.Namespace) -> int:
    """Compares predictions with measured runs, prints the scores and writes the requested files.

    Returns the exit code. It is 130 if Ctrl-C stopped the command; then only the finished rows are shown.
    """
    if args.template:
        return _write_template(args)
    rows, folder = _check_arguments(args)
    from bytescope.train.plan.validation import validation_result, validation_runs

    with progress(None) as bar:
        compiled = validation_runs.run(rows, FACTORY, folder, workers=args.jobs, progress=bar, expect=bar.expect)
    result = validation_result.validate_rows(own_runs.OWN if args.runs else args.set, rows, compiled)
    _show_and_write(args, result)
    return INTERRUPTED if result.left else 0


def _write_template(args: argparse.Namespace) -> int:
    check_files(args, ("template",))
    if args.template.exists():
        raise ReportError(f"--template={args.template} exists: give a new file, because a template overwrites no runs")
    write(args.template, own_runs.template())
    print(f"wrote {args.template}: write a line for each of your runs, then bytescope validate --runs={args.template}")
    return 0


def _check_arguments(args: argparse.Namespace) -> tuple[list[MeasuredRow], Path]:
    """Checks the arguments before anything is compiled. Returns the measured runs to compare with, and the folder to
    store compiled results in.

    Raises ReportError if an argument is wrong.
    """
    if args.overrides:
        key, text = args.overrides[0]
        raise ReportError(
            f"--config.{key}={text} cannot be set, because each measured run has its own config: leave it out"
        )
    if args.runs is not None and args.set is not None:
        raise ReportError(f"--set={args.set} cannot be used with --runs, which are your own: leave one of them out")
    args.set = args.set or "playbook"
    check_files(args)
    if args.jobs is not None and args.jobs < 1:
        raise ReportError(f"--jobs={args.jobs} is too small: give 1 or more")
    folder = args.folder or default_folder()
    if folder.exists() and not folder.is_dir():
        raise ReportError(f"--folder={folder} is a file: give a folder")
    counts, text = _parse_gpu_counts(args.gpus), (args.only or "").lower()
    rows = []
    for row in measured_rows.rows(args.set) if args.runs is None else run_rows.read_runs(args.runs):
        named = f"{row.id} {row.model} {row.chip} {row.setup} {row.source}".lower()
        if (not counts or row.gpus in counts) and text in named:
            rows.append(row)
    if not rows:
        which = f"--set={args.set}" if args.runs is None else f"--runs={args.runs}"
        raise ReportError(f"no measured run of {which} matches --gpus and --only: leave one of them out")
    return _mark_other_chips(args, rows), folder


def default_folder() -> Path:
    """Returns the folder of compiled runs: `validate` beside the other cached results."""
    return row_cache.folder().parent / "validate"


def _mark_other_chips(args: argparse.Namespace, rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Returns the measured runs. A run on another chip than the one on which the rates file was measured is not
    predicted: its field `reason` says why.

    Raises ReportError if no run remains to predict.
    """
    why: dict[str, ReportError] = {}
    for target in sorted({row.target for row in rows if not row.reason}):
        try:
            check_rates(args, [target])
        except ReportError as error:
            why[target] = error
    out = []
    for row in rows:
        if row.reason or row.target not in why:
            out.append(row)
        else:
            out.append(
                dataclasses.replace(row, reason=f"the --rates file was measured on another chip than {row.chip}")
            )
    if why and all(row.reason for row in out):
        raise next(iter(why.values()))
    return out


def _parse_gpu_counts(text: str | None) -> frozenset[int]:
    if text is None:
        return frozenset()
    try:
        counts = frozenset(int(word) for word in text.split(","))
    except ValueError as error:
        raise ReportError(f"--gpus={text} is not a list of GPU counts: give whole numbers such as 8,32") from error
    if min(counts) < 1:
        raise ReportError(f"--gpus={text} has a count that is too small: give 1 or more")
    return counts


def _show_and_write(args: argparse.Namespace, result: ValidationResult) -> None:
    from bytescope.train.plan.validation import validation_view

    out = result.to_json()
    validation_view.show(out)
    if args.runs and out["own"]:
        print(f"to write these rates: bytescope calibrate --from-runs={args.runs} --out=rates.json")
    caveats = (*predicted_caveat(out["rates"]), "Measured seconds and bytes are those of the sources.")
    write_json(args, out, caveats=caveats)
    if args.html:
        write(args.html, validation_view.render_page(out))
