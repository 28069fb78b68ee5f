"""bytescope report: prints the memory report of one program, and writes it as JSON, as a page or for other viewers.

This module reports on a user's program, an HLO dump, or a program of an adapter, such as maxtext:llama2-7b;
`train.commands.report_config` adds configs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.adapters.trainers import find_adapter, is_adapted, overrides_of
from bytescope.memory.commands import github
from bytescope.memory.commands.arguments import (
    DOES_NOT_FIT,
    add_host_memory,
    add_json,
    add_rates,
    add_xla,
    show_written,
    user_path,
    write,
)
from bytescope.memory.commands.json_output import COMPILED, predicted_caveat, write_json
from bytescope.memory.compare.prepared_program import PreparedProgram, prepare_dump
from bytescope.memory.compare.program_factory import FunctionFactory, load_factory
from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.devices.xla_flags import parse_flags
from bytescope.memory.errors import ReportError
from bytescope.memory.host.host_ledger import ledger
from bytescope.memory.records.report_record import Finding, ReportRecord, Subject

if TYPE_CHECKING:
    from bytescope.memory.allocators.program_events import ProgramCall


VERBOSE = (
    "also print the memory timeline, the largest buffers, the training state, memory traffic, and the reason for each "
    "chosen setting"
)


# Subjects of bytescope report that are not configs, as a part of a help text.
OTHER_SUBJECTS = (
    "or your own step, MODULE:FUNCTION or FILE.py:FUNCTION, which returns (step, (state, batch)), optionally followed "
    "by a dict of options of jax.jit, or returns jax.jit(step).trace(...); or an XLA dump, a file "
    "*after_optimizations.hlo.pb (or .gz) or the folder of a dump, whose largest program is used"
)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the output flags: how much of the report is printed, and which files are written."""
    parser.add_argument(
        "--verbose",
        action="store_true",
        help=VERBOSE,
    )
    add_xla(parser)
    parser.add_argument(
        "--allocators",
        action="store_true",
        help="also replay the allocations of a run on models of jax's GPU allocators (bfc, cuda_async, platform), and "
        "show which of them fit",
    )
    parser.add_argument(
        "--try-remedies",
        action="store_true",
        help="also compile the program with the remedy of each finding that has flags or compiler options, and show "
        "what it frees",
    )
    parser.add_argument("--github", action="store_true", help=github.FLAG_HELP)
    add_rates(parser)
    add_host_memory(parser)
    parser.add_argument(
        "--processes-per-node",
        metavar="N",
        type=int,
        help="number of processes on one node, such as 8 for one process per GPU (default 1)",
    )
    add_json(parser, "the report")
    parser.add_argument("--html", metavar="FILE", type=user_path, help="write the report as a page that opens offline")
    parser.add_argument(
        "--export", metavar="DIR", type=user_path, help="write files for XProf, TensorBoard and pprof to this folder"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope report` for a user's function, a dump or the program of an adapter. Returns the exit code."""
    if args.hlo and args.try_remedies:
        raise ReportError(
            f"--try-remedies cannot be used with {args.hlo}, because a dump is not compiled again: give the step as "
            "MODULE:FUNCTION"
        )
    program, subject = open_program(args)
    report, compilation = make_report(program, subject)
    if compilation.jaxpr is not None and report.target:
        report = _with_host_memory(report, compilation.jaxpr)
    if args.try_remedies:
        report = with_tried_remedies(report, functools.partial(report_with_options, program, subject_of=subject))
    show(report, args.verbose)
    more = {}
    if args.allocators:
        from bytescope.memory.allocators.program_events import call_of
        from bytescope.memory.report.allocator_table import CALLS

        more["allocators"] = show_allocators(report, [(call_of(report), CALLS)])
    write_files(args, report, compilation.proto, more)
    code = verdict(args, report)
    if code == DOES_NOT_FIT and not args.hlo:
        _print_ways_to_fit(report)
    elif code == DOES_NOT_FIT:
        show_missing(report, [])
    return code


def _with_host_memory(report: ReportRecord, jaxpr: Any) -> ReportRecord:
    from bytescope.memory.devices import targets
    from bytescope.memory.findings.host_findings import with_host_memory
    from bytescope.memory.report.host_notice import program_host_memory

    target = targets.parse(report.target["name"])
    return with_host_memory(report, program_host_memory(report, jaxpr, target, "flax" in sys.modules))


def open_program(args: argparse.Namespace) -> tuple[PreparedProgram, Callable[[int], Subject] | None]:
    """Returns the program of a user's function, of a dump or of an adapter, and a function from its model FLOPs to its
    description, None if it has none. The program is not compiled yet.

    Raises ReportError if the program, the target or an option of --xla is not valid.
    """
    from bytescope.memory.devices import targets

    options = parse_flags(args.xla)
    start_platform(args)
    subject = None
    if is_adapted(args.config):
        factory = find_adapter(args.config)
        overrides = overrides_of(args.config, args.settings)
        program = factory(overrides, targets.parse(args.target, factory.memory_fraction))
        subject = functools.partial(describe_adapted, program, args.settings)
    elif args.program:
        user_factory = load_factory(args.program)
        # The name of the target is parsed after the user's function, which may set up jax.
        target = args.target if isinstance(user_factory, FunctionFactory) else targets.parse(args.target)
        keys, own_options = user_factory.split_options(dict(args.overrides), target)
        program, options = user_factory(keys, target), {**(own_options or {}), **options}
    else:
        program = prepare_dump(args.hlo, targets.parse(args.target))
    if options:
        program = dataclasses.replace(program, compile=functools.partial(program.compile, options))
    return program, subject


def start_platform(args: argparse.Namespace, fraction: float | None = None) -> None:
    """Sets the platform that jax uses and the number of simulated CPU devices, from the flags. Must run before jax is
    imported.

    fraction: the part (0 to 1) of this machine's GPU memory for jax's memory pool; None means jax's default.
    """
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.chips import base_name
    from bytescope.memory.devices.platform import choose_platform, simulate_devices

    platform = choose_platform(fraction=fraction)
    simulate_devices([args.target])
    if args.program and platform == "cpu" and base_name(args.target) not in ("local", "cpu"):
        simulate_devices([f"cpu:{targets.parse(args.target).n_devices}"])  # for a mesh that the program builds


def make_report(
    program: PreparedProgram, subject_of: Callable[[int], Subject] | None = None
) -> tuple[ReportRecord, Compilation]:
    """Compiles a program. Returns its memory report and the compilation.

    subject_of: a function from the model FLOPs of one call of the step to the report's subject, the trainer's
    description of the program. None leaves the description empty.
    """
    from bytescope.memory.analysis import report_of
    from bytescope.memory.cost import flops

    compilation, target = program.compile()
    compilation = dataclasses.replace(compilation, notes=(*compilation.notes, *program.notes))
    subject = None
    if subject_of is not None:
        counted = flops.count(compilation.jaxpr).model_flops if compilation.jaxpr is not None else None
        subject = subject_of(0 if counted is None else round(program.model_flops(counted)))
    report = report_of(
        compilation,
        target=target,
        config=program.config,
        facts=program.facts,
        roles=program.roles,
        names=program.names,
        loop=program.loop,
        subject=subject,
        seconds=True,
        measure=True,
    )
    return dataclasses.replace(report, findings=tuple(program.findings(report))), compilation


def describe_adapted(program: PreparedProgram, settings: Sequence[str], model_flops: int) -> Subject:
    """Returns the description of an adapter's program for its report.

    settings: the trainer's keys on the command line, as KEY=VALUE. model_flops: FLOPs of the model per call of the
    step, over all devices.
    """
    return Subject(
        name=program.name,
        changes=tuple(settings),
        batch=program.batch,
        policy=program.policy,
        tokens=program.tokens_per_update or 0,
        calls=program.calls_per_update,
        model_flops=model_flops,
    )


def with_tried_remedies(report: ReportRecord, compile_with: Callable[[Finding], ReportRecord | None]) -> ReportRecord:
    """Returns the report with what the remedy of each finding frees, and prints a line before each compile.

    compile_with: compiles the program with the remedy of a finding; returns None if it cannot.
    """
    from bytescope.memory.report.tried_remedies import try_remedies
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    return try_remedies(report, compile_with, lambda line: put(Prose(line, "dim")))


def report_with_options(
    program: PreparedProgram, finding: Finding, subject_of: Callable[[int], Subject] | None = None
) -> ReportRecord | None:
    """Compiles a program with the compiler options of a finding's remedy and returns its report. Returns None if the
    remedy has no compiler options, or if the program was compiled before.

    subject_of: as in `make_report`.
    """
    from bytescope.memory.devices.compiler import trial_options
    from bytescope.memory.report.tried_remedies import options_of

    options = options_of(finding)
    if not options:
        return None
    with trial_options(options):
        report, compilation = make_report(program, subject_of)
    return report if compilation.budget is not None else None


def show(report: ReportRecord, verbose: bool, choices: str = "") -> None:
    """Prints a report.

    verbose: whether to print more than the summary (--verbose). choices: the settings that the program chose for its
    devices, with reasons, one setting per line.
    """
    from bytescope.memory.report import host_view, report_text
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    report_text.show(report, choices=choices, verbose=verbose)
    if verbose and (line := host_view.measured_line(ledger())):
        put(Prose(f"this command: {line}", "dim"))


def show_allocators(report: ReportRecord, calls: Sequence[tuple[ProgramCall, int]]) -> list[dict[str, Any]]:
    """Replays a run on jax's GPU allocators and prints the table. Returns its rows for the JSON file; `memory.replay`
    describes their keys.

    report: the report of the step. calls: the programs of the run, each with its number of calls.
    """
    from rich.console import Group
    from rich.text import Text

    from bytescope.memory.report import allocator_table
    from bytescope.memory.view.console import put

    rows = allocator_table.rows_of(calls, allocator_table.device_of(report))
    put(Group(Text(), allocator_table.render(rows, calls, report)))
    return list(rows)


def write_files(args: argparse.Namespace, report: ReportRecord, proto: bytes, more: Mapping[str, Any]) -> None:
    """Writes the files that the flags --json, --html and --export request.

    proto: the compiled program as a serialized HloProto (XLA's format). more: further keys for the JSON file; the page
    also shows the rows of "allocators". The JSON file also gets the key `command_memory`: the host memory of this
    process by phase, predicted and measured, with the keys of `host_memory`.
    """
    rates = report.prediction.get("rates", "")
    caveats = (COMPILED, *predicted_caveat(rates), *report.notes)
    more = {**more, "command_memory": ledger().to_json()}
    write_json(args, {**report.to_json(), **more}, caveats=caveats)
    if args.html:
        from bytescope.memory.report import report_page

        write(args.html, report_page.render(report, allocators=more.get("allocators", ())))
    if args.export:
        from bytescope.memory.commands.xprof_export import export

        export(args.export, report, proto)
    show_written(args.json, args.html, args.export)


def verdict(args: argparse.Namespace, report: ReportRecord) -> int:
    """Returns the exit code of the command: DOES_NOT_FIT if the program needs more memory than its target has, else 0.
    With --github, also prints annotations and adds the report to the job summary."""
    if args.github:
        github.print_annotations(github.report_annotations(report))
        github.add_summary(github.summary_of_report(report))
    return DOES_NOT_FIT if report.fits is False else 0


def show_missing(report: ReportRecord, advice: Sequence[Any]) -> None:
    """Prints how many bytes the target lacks for the program, then the advice.

    advice: rich renderables, one per suggested change.
    """
    from rich.console import Group
    from rich.text import Text

    from bytescope.memory.analysis import pool_notes
    from bytescope.memory.units import human
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    missing = report.predicted_bytes - (report.limit_bytes or 0)
    words = f"{human(missing)} too much" if missing > 0 else "; ".join(pool_notes(report))
    put(Group(Text(), Prose(f"does not fit: {words}", "bold red"), *advice))


def _print_ways_to_fit(report: ReportRecord) -> None:
    from bytescope.memory.messages.post_mortem import ways_out
    from bytescope.memory.units import human
    from bytescope.memory.view.text_layout import Prose

    show_missing(report, [Prose(f"{human(way.bytes)}  {way.words}", indent=2) for way in ways_out(report)])
