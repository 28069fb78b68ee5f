"""bytescope report: the memory report of a config's training step, or of any program.

`memory.commands.report_command` makes the report. A config also has the memory of generation.
"""

from __future__ import annotations

import argparse

from bytescope.memory.commands import report_command
from bytescope.memory.commands.arguments import check_files
from bytescope.memory.commands.json_output import COMPILED, write_json
from bytescope.memory.errors import ReportError
from bytescope.train.commands.config_arguments import PROGRAM_FORMS, add_subject, require_subject
from bytescope.train.generate import generate_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope report` to the parser."""
    others = {
        "SCRIPT.py": "any other Python file: its training step is found by running it without data",
        "RUN": "the folder of a run of bytescope train",
        "REPORT.json": "a report that bytescope report --json wrote",
        "TRACE": "a file *.xplane.pb, or the folder of a trace",
    }
    add_subject(parser, forms=PROGRAM_FORMS | others, needs="program")
    parser.add_argument(
        "--formulas",
        action="store_true",
        help="also show the memory that published formulas predict and the difference from the compiler "
        "(needs a config)",
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="also compile the other programs of a run (init, evaluation and the final sample) and show their peaks "
        "(needs a config)",
    )
    parser.add_argument(
        "--generate",
        action="store_true",
        help="report on generation from the config's model instead of training: weights, KV cache and the number of "
        "sequences that fit",
    )
    generating = parser.add_argument_group("with --generate")
    generate_flags.add_dtype(generating)
    generate_flags.add_weights(generating)
    generate_flags.add_devices(generating)
    generate_flags.add_pool(generating)
    report_command.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Compiles the program, prints its memory report and writes the requested files; returns the exit code."""
    subject = require_subject(args)
    _check_flags(args)
    if not args.generate:
        return report_command.run(args)
    subject.start(args.target)
    return _report_generation(args)


def _check_flags(args: argparse.Namespace) -> None:
    """Raises ReportError if flags contradict each other, or if a requested file cannot be written."""
    check_files(args)
    generate_flags.check_ranges(args)
    for flag, value in generate_flags.given_pool_flags(args):
        if not args.generate:
            raise ReportError(f"--{flag}={value} is only valid with --generate: give both, or leave it out")
    if args.generate and args.html:
        raise ReportError(f"--html={args.html} cannot be used with --generate, which has no page: give --json=FILE")
    for flag in ("formulas", "run", "allocators", "try_remedies", "github", "export"):
        if args.generate and getattr(args, flag):
            raise ReportError(
                f"--{flag.replace('_', '-')} cannot be used with --generate, because it belongs to a training step: "
                "leave one of them out"
            )


def _report_generation(args: argparse.Namespace) -> int:
    from bytescope.memory.view.console import put
    from bytescope.train.generate.budget import GenerationReport, budget_view
    from bytescope.train.generate.open_engine import plan
    from bytescope.train.program import config_files as configs

    target = args.subject.devices(args.target)
    planned = plan(args.subject.name, configs.load(args.subject.name, args.subject.overrides), target, args)
    put(budget_view(planned))
    if args.json:
        result = GenerationReport(**vars(planned.budget), config=planned.title, reports=planned.reports)
        write_json(args, result, target=target.to_json(), caveats=(COMPILED,))
    return 0
