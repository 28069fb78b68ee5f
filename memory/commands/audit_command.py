"""bytescope report --audit: compares what a program asks jax and XLA to do with what the compiled program does.

This module audits a user's program, an HLO dump, or the program of an adapter such as MaxText.
`train.commands.audit_config` audits bytescope's own configs.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from bytescope.memory.commands import report_command
from bytescope.memory.commands.arguments import add_json, add_xla, show_written, user_path, write
from bytescope.memory.commands.json_output import COMPILED, write_json
from bytescope.memory.records.report_record import ReportRecord

# The exit code of --strict if a request was not honored.
NOT_HONORED = 1


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bytescope report --audit` except those that name the program: --strict, --xla, --json
    and --html."""
    parser.add_argument(
        "--strict", action="store_true", help="exit with code 1 if XLA does not do what the program asks for"
    )
    add_xla(parser)
    add_json(parser, "the audit")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=user_path,
        help="write the program's report, including the audit, as an HTML page",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope report --audit` for a user's function, a dump or the program of an adapter: compiles it, prints
    the audit, and writes the files of --json and --html. Returns the exit code: 1 with --strict if a request was not
    honored, else 0."""
    program, subject = report_command.open_program(args)
    report, _ = report_command.make_report(program, subject)
    show(report)
    return finish(args, report)


def show(report: ReportRecord) -> None:
    """Prints the audit of a report: what the program asks jax and XLA to do, and whether the compiled program does
    it."""
    from rich.console import Group
    from rich.text import Text

    from bytescope.memory.report import audit_view
    from bytescope.memory.view.console import put

    title = Text(f"{report.title} on {report.target.get('name', 'an unnamed target')}", "bold")
    put(Group(title, Text(), audit_view.render(report.audit)))


def finish(args: argparse.Namespace, report: ReportRecord) -> int:
    """Writes the files of --json and --html. Returns the exit code: 1 with --strict if a request was not honored, else
    0."""
    result: dict[str, Any] = {
        "program": report.title,
        "target": report.target,
        "versions": report.versions,
        "honored": sum(row.honored is True for row in report.audit),
        "not_honored": sum(row.honored is False for row in report.audit),
        "unknown": sum(row.honored is None for row in report.audit),
        "requests": [
            dataclasses.asdict(row) | {"honored": row.honored, "inferred": row.inferred} for row in report.audit
        ],
    }
    write_json(args, result, caveats=(COMPILED, *report.notes))
    if args.html:
        from bytescope.memory.report import report_page

        write(args.html, report_page.render(report))
    show_written(args.json, args.html)
    return NOT_HONORED if args.strict and result["not_honored"] else 0
