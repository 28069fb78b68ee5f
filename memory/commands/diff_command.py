"""bytescope diff: compares the JSON files of two reports."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from bytescope.memory.commands import github
from bytescope.memory.commands.arguments import add_json, check_files, user_path, write
from bytescope.memory.commands.json_output import COMPILED, write_json
from bytescope.memory.records import report_diff, report_record
from bytescope.memory.report.difference import document
from bytescope.memory.view import draw_page, draw_terminal
from bytescope.memory.view.console import put
from bytescope.memory.view.text_layout import Prose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bytescope diff`: the two reports, --fail-above, and the output files."""
    parser.add_argument(
        "before",
        metavar="BEFORE.json",
        help="first report: a file that bytescope report --json wrote, or the folder of a run of bytescope train",
    )
    parser.add_argument(
        "after",
        metavar="AFTER.json",
        help="second report: a file that bytescope report --json wrote, or the folder of a run of bytescope train",
    )
    parser.add_argument(
        "--fail-above",
        metavar="PERCENT",
        type=_percent,
        default=None,
        help="exit with code 1 if the live bytes at the peak, or the bytes that the runtime allocates, grew by more "
        "than PERCENT from BEFORE to AFTER (default: never)",
    )
    add_json(parser, "the differences")
    parser.add_argument("--html", metavar="FILE", type=user_path, help="write the differences as a page")
    parser.add_argument("--github", action="store_true", help=github.FLAG_HELP)


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # nor nan
        raise argparse.ArgumentTypeError(f"{text} is not a percentage: give a number of 0 or more")
    return value


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope diff`: prints the differences between two reports. Returns 1 if memory grew by more than
    --fail-above, else 0."""
    check_files(args)
    before, after = (report_record.load(name) for name in (args.before, args.after))
    changes = report_diff.diff(before, after)
    shown = document(before, after, changes)
    draw_terminal.show(shown)
    if args.html:
        write(args.html, draw_page.draw(shown))
    failed = report_diff.grew_above(changes, args.fail_above) if args.fail_above is not None else ()
    if args.github:
        github.print_annotations(github.difference_annotations(before, after, changes, failed, args.fail_above or 0.0))
        github.add_summary(
            github.summary_of_difference(before, after, changes, _distinguish_names(args.before, args.after))
        )
    result = report_diff.DiffResult(
        changes,
        report_diff.measures(before, after),
        {name: (old, new) for name, old, new in report_diff.version_changes(before, after)},
        tuple(change.name for change in failed),
    )
    write_json(args, result, target=after.target, caveats=(COMPILED,))
    for change in failed:
        percent = "from zero" if math.isinf(change.percent) else f"by {change.percent:.2f} %"
        put(Prose(f"{change.name} grew {percent}, above {args.fail_above:g} %", "bold red"))
    return 1 if failed else 0


def _distinguish_names(before: str, after: str) -> tuple[str, str]:
    paths = Path(before), Path(after)
    if paths[0].name != paths[1].name:
        return paths[0].name, paths[1].name
    first, second = (str(Path(path.absolute().parent.name) / path.name) for path in paths)
    return first, second
