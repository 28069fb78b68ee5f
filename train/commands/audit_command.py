"""bytescope report --audit: compares what a program asks jax and XLA to do with what the compiled program does."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from bytescope.memory.audit.pass_history import with_passes
from bytescope.memory.commands.arguments import (
    add_json,
    add_xla,
    check_files,
    show_written,
    user_path,
    write,
)
from bytescope.memory.commands.json_output import COMPILED, write_json
from bytescope.memory.devices.compiler import pass_dumps
from bytescope.memory.records.audit_record import AuditResult, JudgedRequest
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.commands.config_arguments import PROGRAM_FORMS, add_subject, require_subject

# The exit code of --strict if a request was not honored.
NOT_HONORED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope report --audit` to the parser."""
    add_subject(parser, forms=PROGRAM_FORMS, needs="program")
    parser.add_argument(
        "--strict", action="store_true", help="exit with code 1 if XLA does not do what the program asks for"
    )
    parser.add_argument(
        "--passes",
        action="store_true",
        help="also name the compiler pass in which XLA undid a checkpoint, offload or donation; XLA writes the program "
        "after each pass to a temporary folder for this",
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
    """Compiles the program, prints what it asks jax and XLA to do (recompute, save, offload, donate, keep sharded) and
    whether XLA does it, and writes the files of --json and --html. Returns the exit code: 1 with --strict if a request
    was not honored, else 0.

    Raises ReportError for flags that cannot be combined, and for a program that cannot be compiled.
    """
    check_files(args)
    require_subject(args)
    report = make_audited_report(args)
    show(report)
    return finish(args, report)


def make_audited_report(args: argparse.Namespace) -> ReportRecord:
    """Compiles the program and returns its report with the audit. With --passes, XLA also dumps the module after each
    compiler pass, and the audit names the pass that undid a request."""
    if not args.passes:
        return args.subject.report(args.target)
    with tempfile.TemporaryDirectory(prefix="passes-") as folder:
        with pass_dumps(Path(folder)):
            report = args.subject.report(args.target)
        rows = with_passes(report.audit, Path(folder))
    return dataclasses.replace(report, audit=rows)


def show(report: ReportRecord) -> None:
    """Prints the audit of a report: what the program asks jax and XLA to do, and whether the compiled program does
    it."""
    from bytescope.memory.report import audit_view
    from bytescope.memory.view import draw_terminal

    draw_terminal.show(audit_view.document(report))


def finish(args: argparse.Namespace, report: ReportRecord) -> int:
    """Writes the files of --json and --html. Returns the exit code: 1 with --strict if a request was not honored, else
    0."""
    requests = tuple(JudgedRequest(**vars(row)) for row in report.audit)
    result = AuditResult(report.title, report.target, report.versions, requests)
    write_json(args, result, caveats=(COMPILED, *report.notes))
    if args.html:
        from bytescope.memory.report import report_page

        write(args.html, report_page.render(report))
    show_written(args.json, args.html)
    return NOT_HONORED if args.strict and result.not_honored else 0
