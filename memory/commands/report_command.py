"""bytescope report: prints the memory report of one program, and writes it as JSON, as a page or for other viewers.

It reports on every kind of subject that has a program. `train.commands.report_config` adds the memory of generation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from bytescope.memory.host.host_ledger import ledger
from bytescope.memory.records.host_record import HostMemory
from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.memory.records.result import ABSENT, Absent
from bytescope.memory.subjects.subject import Subject, make_report

if TYPE_CHECKING:
    from bytescope.memory.allocators.program_events import ProgramCall
    from bytescope.memory.compare.prepared_program import PreparedProgram
    from bytescope.memory.formulas.model_facts import ModelFacts

# Flags whose output needs the compiled program, not only its report.
_NEED_PROGRAM = ("formulas", "run", "allocators", "try_remedies", "export")

VERBOSE = (
    "also print the memory timeline, the largest buffers, the training state, memory traffic, and the reason for each "
    "chosen setting"
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
        help="also simulate the allocations of a run in each of jax's GPU allocators (bfc, cuda_async, platform), and "
        "show in which of them they fit",
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
        help="predict the host memory of a node with N processes, such as 8 for one process per GPU (default 1)",
    )
    add_json(parser, "the report")
    parser.add_argument("--html", metavar="FILE", type=user_path, help="write the report as a page that opens offline")
    parser.add_argument(
        "--export", metavar="DIR", type=user_path, help="write files for XProf, TensorBoard and pprof to this folder"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the memory report of `args.subject` and writes the requested files. Returns the exit code."""
    subject: Subject = args.subject
    subject.start(args.target)
    if any(getattr(args, flag) for flag in _NEED_PROGRAM):
        return _compile_and_report(args, "")
    from bytescope.memory.compare import row_cache

    name = subject.cache_name(args.target, [args.host_memory, args.processes_per_node])
    finished = row_cache.read(row_cache.folder(), name) if name else None
    if finished is None:
        return _compile_and_report(args, name)
    report = ReportRecord.from_json(finished["report"])
    show(report, args.verbose, finished["choices"])
    return _finish(args, report, b"", {"batch": finished["batch"]})


def _compile_and_report(args: argparse.Namespace, name: str) -> int:
    """Compiles the program, prints its report and writes the requested files; returns the exit code.

    name: the name by which the finished report is cached, "" to not cache it.
    """
    program = args.subject.program(args.target)
    if args.allocators:
        from bytescope.memory.report.allocator_table import check_target

        check_target(args.subject.devices(args.target).to_json())
    report, compilation = make_report(program)
    report = program.complete(report, compilation.jaxpr)
    if args.try_remedies:
        report = _with_tried_remedies(report, functools.partial(_report_with_remedy, args, program))
    if name:
        from bytescope.memory.compare import row_cache

        finished = {"report": report.to_json(), "choices": program.choices, "batch": program.batch}
        row_cache.write(row_cache.folder(), name, {"status": "ok", **finished})
    show(report, args.verbose, program.choices)
    more: dict[str, Any] = {"batch": program.batch} if program.batch else {}
    if args.formulas and program.facts:
        more["formula"] = _show_formulas(report, program.facts, compilation.jaxpr)
    others = program.run_programs() if (args.run or args.allocators) and program.run_programs else None
    if args.run and others:
        more["run"] = _show_peaks_of_run(report, others.peaks)
    if args.allocators:
        from bytescope.memory.allocators.program_events import call_of
        from bytescope.memory.report.allocator_table import CALLS

        calls = others.calls(report) if others else [(call_of(report), CALLS)]
        more["allocators"] = _show_allocators(report, calls)
    return _finish(args, report, compilation.proto, more)


@dataclasses.dataclass(frozen=True)
class ReportResult(ReportRecord):
    """The result of bytescope report: the report of the program, and what the flags of the command ask for.

    Fields, in addition to those of `ReportRecord`:
        command_memory: the host memory of this process by phase, predicted and measured.
        batch: the sizes that make up the batch, in words.
        formula: the memory that published formulas predict (--formulas); None if they do not support the model.
        run: program of a run -> peak bytes, state included (--run).
        allocators: the outcome with each of jax's allocators (--allocators).
    """

    command_memory: HostMemory | Absent = ABSENT
    batch: str | Absent = ABSENT
    formula: Mapping[str, Any] | Absent | None = ABSENT
    run: Mapping[str, int] | Absent = ABSENT
    allocators: Sequence[Mapping[str, Any]] | Absent = ABSENT


def _finish(args: argparse.Namespace, report: ReportRecord, proto: bytes, more: Mapping[str, Any]) -> int:
    _write_files(args, report, proto, more)
    if args.github:
        github.print_annotations(github.report_annotations(report))
        github.add_summary(github.summary_of_report(report))
    if report.fits is not False:
        return 0
    _show_missing(report, args.subject.ways_to_fit(report, args.target))
    return DOES_NOT_FIT


def _report_with_remedy(args: argparse.Namespace, program: PreparedProgram, finding: Finding) -> ReportRecord | None:
    """Compiles the program with the remedy of a finding, its flags or compiler options. Returns the report; None if the
    remedy has neither, or if the program cannot run with it."""
    changed = args.subject.with_flags(finding.flags)
    if changed is None:
        return _report_with_options(program, finding)
    try:
        return make_report(changed.program(args.target))[0]
    except ValueError:  # the program cannot run with this remedy
        return None


def _with_tried_remedies(report: ReportRecord, compile_with: Callable[[Finding], ReportRecord | None]) -> ReportRecord:
    """Returns the report with what the remedy of each finding frees, and prints a line before each compile.

    compile_with: compiles the program with the remedy of a finding; returns None if it cannot.
    """
    from bytescope.memory.report.tried_remedies import try_remedies
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    return try_remedies(report, compile_with, lambda line: put(Prose(line, "dim")))


def _report_with_options(program: PreparedProgram, finding: Finding) -> ReportRecord | None:
    """Compiles a program with the compiler options of a finding's remedy and returns its report. Returns None if the
    remedy has no compiler options, or if the program was compiled before."""
    from bytescope.memory.devices.compiler import trial_options
    from bytescope.memory.report.tried_remedies import options_of

    options = options_of(finding)
    if not options:
        return None
    with trial_options(options):
        report, compilation = make_report(program)
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


def _show_allocators(report: ReportRecord, calls: Sequence[tuple[ProgramCall, int]]) -> list[dict[str, Any]]:
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


def _write_files(args: argparse.Namespace, report: ReportRecord, proto: bytes, more: Mapping[str, Any]) -> None:
    """Writes the files that the flags --json, --html and --export request.

    proto: the compiled program as a serialized HloProto (XLA's format). more: further fields of `ReportResult`; the
    page also shows the rows of "allocators".
    """
    rates = report.prediction.get("rates", "")
    caveats = (COMPILED, *predicted_caveat(rates), *report.notes)
    write_json(args, ReportResult(**vars(report), **more, command_memory=ledger()), caveats=caveats)
    if args.html:
        from bytescope.memory.report import report_page

        write(args.html, report_page.render(report, allocators=more.get("allocators", ())))
    if args.export:
        from bytescope.memory.commands.xprof_export import export

        export(args.export, report, proto)
    show_written(args.json, args.html, args.export)


def _show_missing(report: ReportRecord, advice: Sequence[Any]) -> None:
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


def _show_formulas(report: ReportRecord, facts: ModelFacts, jaxpr: Any) -> dict[str, Any] | None:
    """Prints the memory that published formulas predict next to the memory that the compiler reports.

    Returns the predicted bytes for the JSON file; None if the formulas do not support the model.

    Args:
      report: the compiler's memory report of the training step.
      facts: model shape, sharding, precision and optimizer of the step, which the formulas need.
      jaxpr: the jaxpr of the step, whose FLOPs are counted.
    """
    from rich.console import Group
    from rich.text import Text

    from bytescope.memory.compare import compare_text
    from bytescope.memory.cost import flops
    from bytescope.memory.formulas import reconcile
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    formula = reconcile.formula_of(facts, report.target.get("platform", ""))
    if isinstance(formula, str):
        put(Group(Text(), Prose(f"no formula: {formula}")))
        return None
    counted = flops.count(jaxpr)
    compare_text.show_formulas(
        formula,
        reconcile.lines(
            formula,
            report.peak_bytes,
            report.breakdown,
            {"model_flops": counted.model_flops, "hardware_flops": counted.hardware_flops},
            report.host_bytes,
        ),
    )
    return dataclasses.asdict(formula)


def _show_peaks_of_run(report: ReportRecord, others: Mapping[str, int]) -> dict[str, int]:
    from bytescope.memory.units import human
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    sizes = {"step": report.predicted_bytes, **others}
    largest = max(sizes, key=sizes.__getitem__)
    parts = ", ".join(f"{name} {human(size)}" for name, size in sizes.items())
    put(Prose(f"peaks of the programs of a run, including state: {parts}; the largest peak is {largest}"))
    return sizes
