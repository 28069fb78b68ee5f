"""bytescope validate: predicted seconds and bytes against what real GPUs measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from bytescope.memory.commands.arguments import (
    INTERRUPTED,
    add_rates,
    check_files,
    check_rates,
    user_path,
    write,
)
from bytescope.memory.compare import row_cache
from bytescope.memory.errors import ReportError
from bytescope.memory.view.progress_bar import progress
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.plan.validation import measured_rows
from bytescope.train.plan.validation.measured_rows import SETS, MeasuredRow
from bytescope.train.plan.validation.validation_result import ValidationResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    listed = "; ".join(f"{name}: {what}" for name, what in SETS.items())
    parser.add_argument(
        "--set",
        choices=SETS,
        default="playbook",
        metavar="NAME",
        help=f"the measured runs (default: playbook). {listed}",
    )
    parser.add_argument("--gpus", metavar="N,N", help="runs on so many GPUs alone, such as 8,32")
    parser.add_argument(
        "--only", metavar="TEXT", help="rows alone whose model, chip or setup has this text, such as tp4"
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        type=user_path,
        help="where compiled rows are kept, one file each, "
        "so that the command goes on where it stopped (default: in the cache)",
    )
    add_rates(parser)
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="compile N programs at once (default: one per core, as far as 20 GiB of host memory allow)",
    )
    parser.add_argument("--json", metavar="FILE", type=user_path, help="write every row and every score as JSON")
    parser.add_argument("--html", metavar="FILE", type=user_path, help="write them as a page that opens offline")


def run(args: argparse.Namespace) -> int:
    """Prints the scores and writes the files; returns 130 after Ctrl-C, with the finished rows."""
    rows, folder = _checked(args)
    from bytescope.train.plan.validation import validation_result, validation_runs

    with progress(sum(not row.reason for row in rows)) as tell:
        compiled = validation_runs.run(rows, FACTORY, folder, workers=args.jobs, progress=tell)
    found = validation_result.validate_rows(args.set, rows, compiled)
    _finish(args, found)
    return INTERRUPTED if found.left else 0


def _checked(args: argparse.Namespace) -> tuple[list[MeasuredRow], Path]:
    """Returns the chosen rows and the folder of compiled ones. Raises ReportError for a mistake, before anything is
    compiled."""
    if args.overrides:
        key, text = args.overrides[0]
        raise ReportError(f"--config.{key}={text}: the rows of a set say their configs; leave it out")
    check_files(args)
    if args.jobs is not None and args.jobs < 1:
        raise ReportError(f"--jobs={args.jobs}: give 1 or more")
    folder = args.folder or row_cache.folder().parent / "validate"
    if folder.exists() and not folder.is_dir():
        raise ReportError(f"--folder={folder}: it is a file; give a folder")
    counts, text = _counts(args.gpus), (args.only or "").lower()
    rows = []
    for row in measured_rows.rows(args.set):
        named = f"{row.id} {row.model} {row.chip} {row.setup} {row.source}".lower()
        if (not counts or row.gpus in counts) and text in named:
            rows.append(row)
    if not rows:
        raise ReportError(f"no row of {args.set} is asked for: leave --gpus or --only out")
    return _of_rates(args, rows), folder


def _of_rates(args: argparse.Namespace, rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Returns the rows. A row on another chip than --rates was measured on gets this as its reason not to be predicted.

    Raises ReportError if no row is left.
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
            out.append(dataclasses.replace(row, reason=f"--rates is of another chip than {row.chip}"))
    if why and all(row.reason for row in out):
        raise next(iter(why.values()))
    return out


def _counts(text: str | None) -> frozenset[int]:
    """Returns the numbers of GPUs of --gpus; none for all."""
    if text is None:
        return frozenset()
    try:
        found = frozenset(int(word) for word in text.split(","))
    except ValueError as error:
        raise ReportError(f"--gpus={text}: give whole numbers with commas between, such as 8,32") from error
    if min(found) < 1:
        raise ReportError(f"--gpus={text}: give 1 or more")
    return found


def _finish(args: argparse.Namespace, found: ValidationResult) -> None:
    """Prints the scores and writes the files."""
    from bytescope.train.plan.validation import validation_view

    out = found.to_json()
    validation_view.show(out)
    if args.json:
        write(args.json, json.dumps(out, indent=1) + "\n")
    if args.html:
        write(args.html, validation_view.render_page(out))
