"""bytescope report: the memory report of a config's training step, or of any program.

`memory.commands.report_command` reports on other programs. For a config there are more options: the published
formulas, the other programs of a run, and the memory of generation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.commands import report_command
from bytescope.memory.commands.arguments import DOES_NOT_FIT, check_files, refuse_flags
from bytescope.memory.commands.json_output import COMPILED, write_json
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.train.commands.config_arguments import add_subject, check_program, with_xla
from bytescope.train.generate import generate_flags
from bytescope.train.launch.runtime import TRAIN_FRACTION

if TYPE_CHECKING:
    from bytescope.memory.compare.prepared_program import PreparedProgram
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.formulas.model_facts import ModelFacts


# Flags whose output needs the compiled program, not only its report.
_NEED_PROGRAM = ("formulas", "run", "allocators", "try_remedies", "export")
# The packages whose code makes a report.
_SOURCES = ("bytescope.configs", "bytescope.memory", "bytescope.model", "bytescope.train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope report` to the parser."""
    others = "or a training script, a run directory, a saved report or a profiler trace"
    add_subject(parser, others=f"{report_command.OTHER_SUBJECTS}; {others}", hlo=None)
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
    if is_adapted(args.config):
        check_files(args)
        refuse_flags(args, ("formulas", "run", "generate"))
        return report_command.run(args)
    _check_flags(args)
    if not args.config:
        return report_command.run(args)
    args.overrides = with_xla(args, args.overrides)
    report_command.start_platform(args, TRAIN_FRACTION.value)
    return _report_generation(args) if args.generate else _report_step(args)


def _check_flags(args: argparse.Namespace) -> None:
    """Raises ReportError if flags contradict each other, or if a requested file cannot be written."""
    check_files(args)
    check_program(args)
    other = args.program or args.hlo
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
    for flag in ("formulas", "run", "generate"):
        if other and getattr(args, flag):
            raise ReportError(f"--{flag} cannot be used with {other}, because it needs a config: give a config instead")


def _report_step(args: argparse.Namespace) -> int:
    from bytescope.memory.compare import row_cache
    from bytescope.memory.devices import targets
    from bytescope.memory.report.allocator_table import check_target

    target = targets.parse(args.target, TRAIN_FRACTION)
    if args.allocators:
        check_target(target.to_json())
    name = _cache_name(args, target)
    finished = row_cache.read(row_cache.folder(), name) if name else None
    if finished is not None:
        report = ReportRecord.from_json(finished["report"])
        report_command.show(report, args.verbose, finished["choices"])
        return _finish(args, report, b"", {"batch": finished["batch"]})
    return _compile_and_report(args, target, name)


def _cache_name(args: argparse.Namespace, target: Target) -> str:
    """Returns the name of the finished report in the cache of rows. It depends on everything that a report depends on:
    the whole config, the target, versions, environment, rates and all of this package's source files. Returns "" if the
    report is not cached: for devices of this machine, for configs that name files, and with flags that need the
    compiled program."""
    from bytescope.memory.compare import row_cache
    from bytescope.memory.compare.jobs import Jobs
    from bytescope.memory.seconds import rates
    from bytescope.train.plan.config_factory import FACTORY, names_files
    from bytescope.train.program import config_files as configs

    if not target.is_described or any(getattr(args, flag) for flag in _NEED_PROGRAM):
        return ""
    resolved = configs.load_flat(args.config, args.overrides)
    if names_files(resolved):
        return ""
    sources = row_cache.digest_files(row_cache.source_files(_SOURCES))
    # A report shows the paths of source files.
    place = Path(row_cache.__file__).parents[2]
    given = [str(place), args.config, list(args.overrides), args.host_memory, args.processes_per_node, rates.digest()]
    jobs = Jobs(FACTORY, more_sources=f"{sources} {given}")
    return f"{jobs.name(resolved, target.name)}-report"


def _finish(args: argparse.Namespace, report: ReportRecord, proto: bytes, more: Mapping[str, Any]) -> int:
    report_command.write_files(args, report, proto, more)
    code = report_command.verdict(args, report)
    if code == DOES_NOT_FIT:
        _show_advice(report, args)
    return code


def _compile_and_report(args: argparse.Namespace, target: Target, name: str) -> int:
    """Compiles the step, prints its report and writes the requested files; returns the exit code.

    name: the name by which the finished report is cached, "" to not cache it.
    """
    from bytescope.memory.compare import row_cache
    from bytescope.memory.findings.host_findings import with_host_memory
    from bytescope.train.plan.config_factory import build_program, prepare_program, subject_of
    from bytescope.train.plan.report_remedies import with_remedies
    from bytescope.train.plan.run_memory import checkpoint_findings, run_host_memory
    from bytescope.train.program import config_files as configs

    program = build_program(args.config, args.overrides, target)
    prepared = prepare_program(program, target, configs.load_flat(args.config, args.overrides))
    subject = functools.partial(subject_of, args.config, args.overrides, prepared)
    report, compilation = report_command.make_report(prepared, subject)
    report = with_remedies(report)
    if compilation.jaxpr is not None:
        report = with_host_memory(report, run_host_memory(program, report, target, compilation.jaxpr))
        report = dataclasses.replace(report, findings=(*report.findings, *checkpoint_findings(program, target)))
    if args.try_remedies:
        report = with_tried_remedies(args, target, prepared, report)
    if name:
        finished = {
            "status": "ok",
            "report": report.to_json(),
            "choices": prepared.choices,
            "batch": prepared.batch,
        }
        row_cache.write(row_cache.folder(), name, finished)
    report_command.show(report, args.verbose, prepared.choices)
    more: dict[str, Any] = {"batch": prepared.batch}
    if args.formulas and prepared.facts:
        more["formula"] = _show_formulas(report, prepared.facts, compilation.jaxpr)
    if args.run or args.allocators:
        from bytescope.train.plan import run_memory

        others = run_memory.other_programs(program)
    if args.run:
        more["run"] = _show_peaks_of_run(report, run_memory.peaks(program, others))
    if args.allocators:
        more["allocators"] = report_command.show_allocators(report, run_memory.run_calls(report, others))
    return _finish(args, report, compilation.proto, more)


def with_tried_remedies(
    args: argparse.Namespace, target: Target, prepared: PreparedProgram, report: ReportRecord
) -> ReportRecord:
    """Returns the report of a config's step with what the remedy of each finding frees. Each remedy is compiled.

    Args:
        args: the command line with the config and its overrides.
        target: the devices to compile for.
        prepared: the step as it is.
        report: the report of the step, with remedies as flags.
    """
    from bytescope.train.plan.advice import parse_flags
    from bytescope.train.plan.config_factory import build_program, prepare_program, subject_of
    from bytescope.train.program import config_files as configs

    subject = functools.partial(subject_of, args.config, args.overrides, prepared)

    def compile_with(finding: Finding) -> ReportRecord | None:
        if not finding.flags:
            return report_command.report_with_options(prepared, finding, subject)
        overrides = [*args.overrides, *parse_flags(finding.flags)]
        try:
            changed = build_program(args.config, overrides, target)
            flat = configs.load_flat(args.config, overrides)
            return report_command.make_report(prepare_program(changed, target, flat), subject)[0]
        except ValueError:  # the config cannot run with this remedy
            return None

    return report_command.with_tried_remedies(report, compile_with)


def _report_generation(args: argparse.Namespace) -> int:
    from bytescope.memory.devices import targets
    from bytescope.memory.view.console import put
    from bytescope.train.generate.budget import budget_view
    from bytescope.train.generate.open_engine import plan
    from bytescope.train.program import config_files as configs

    target = targets.parse(args.target, TRAIN_FRACTION)
    planned = plan(args.config, configs.load(args.config, args.overrides), target, args)
    put(budget_view(planned))
    if args.json:
        reports = {name: report.to_json() for name, report in planned.reports.items()}
        result = {"config": planned.title, **planned.budget.to_json(), "reports": reports}
        write_json(args, result, target=target.to_json(), caveats=(COMPILED,))
    return 0


def _show_advice(report: ReportRecord, args: argparse.Namespace) -> None:
    from rich.text import Text

    from bytescope.memory.view.text_layout import CopyCommand, Prose
    from bytescope.train.plan import advice

    parts: list[Any] = [Prose(line) for line in advice.lines(report, advice.open_levers(report), [])]
    if command := advice.fit_command(args.config, args.target, args.overrides, report):
        parts += [Text("find the fastest configuration that fits, by compiling:", style="bold"), CopyCommand(command)]
    report_command.show_missing(report, parts)


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
